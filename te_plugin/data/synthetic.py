"""Made-up token documents, for tests of machinery and of speed. They are not text, and a run that uses them says so.

Each id follows from the one before it, with some noise: there is something to learn, and the best possible loss is
known.
"""

from __future__ import annotations

import math

import numpy as np

from te_plugin.data.errors import DataError
from te_plugin.data.indexed import TokenStore, store_of
from te_plugin.data.packing import hashed

DOCUMENTS = 2000
NOTE = "synthetic tokens (data.source=synthetic): not text; losses say nothing about language"
_NOISE_EVERY = 4  # one id in so many is random
_KEY = 20_26


def synthetic_documents(vocab_size: int, seq_len: int, documents: int = DOCUMENTS) -> TokenStore:
    """Documents of 9 to 4*seq_len ids, lengths log-uniform, each ended by id vocab_size - 1; the same at every call.

    Raises DataError for a vocabulary of fewer than 3 ids.
    """
    if vocab_size < 3:
        raise DataError(f"a vocabulary of {vocab_size} ids is too small for synthetic data: 3 at least")
    alphabet = vocab_size - 1
    shortest, longest = 8, max(8, 4 * seq_len - 1)
    draws = hashed(documents, _KEY, 1) / 2.0**64
    lengths = (shortest * (longest / shortest) ** draws).astype(np.int64)
    made = []
    for number, length in enumerate(lengths):
        noise = hashed(length, _KEY, 2, number)
        jump = (noise % np.uint64(_NOISE_EVERY) == 0) * ((noise >> np.uint64(8)) % np.uint64(alphabet))
        ids = np.cumsum(jump.astype(np.int64) + 1) % alphabet  # the next id, or with a random jump on top
        made.append(np.append(ids, vocab_size - 1).astype(np.int32))
    return store_of(made)


def best_loss(vocab_size: int) -> float:
    """Entropy a token of the process in nats, document ends aside: no model can do better."""
    alphabet = vocab_size - 1
    jump = 1 / _NOISE_EVERY / alphabet  # chance of each id that is not the next one
    stay = 1 - (alphabet - 1) * jump
    return -(stay * math.log(stay) + (alphabet - 1) * jump * math.log(jump))
