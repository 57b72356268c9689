"""Made-up token documents, for tests of machinery and of speed. They are not text, and a run that uses them says so.

Each id follows from the one before it, with some noise: there is something to learn, and the best possible loss is known.
"""

from __future__ import annotations

import math

import numpy as np

from te_plugin.data.indexed import TokenStore, store_of
from te_plugin.data.packing import hashed
from te_plugin.data.tokenizers import Tokenizer

DOCUMENTS = 2000
NOTE = "synthetic tokens (data.source=synthetic): not text; losses say nothing about language"
_ALPHABET = 96
_NOISE_EVERY = 4  # one id in so many is random
_KEY = 20_26


def synthetic_documents(tokenizer: Tokenizer, seq_len: int, documents: int = DOCUMENTS) -> TokenStore:
    """Documents of 8 to 4*seq_len tokens, lengths log-uniform: the same ones whenever tokenizer and seq_len are the same."""
    alphabet = min(_ALPHABET, tokenizer.eos_id)
    shortest, longest = 8, 4 * seq_len
    draws = hashed(documents, _KEY, 1) / 2.0**64
    lengths = (shortest * (longest / shortest) ** draws).astype(np.int64)
    made = []
    for number, length in enumerate(lengths):
        noise = hashed(length, _KEY, 2, number)
        jump = (noise % np.uint64(_NOISE_EVERY) == 0) * (noise >> np.uint64(8)) % np.uint64(alphabet)
        ids = (np.cumsum(jump.astype(np.int64) + 1)) % alphabet  # +1 each step, or a random jump
        head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        made.append(np.concatenate([head, ids, [tokenizer.eos_id]]).astype(np.int32))
    return store_of(made)


def best_loss() -> float:
    """Entropy a token of the process in nats, document ends aside."""
    stay = 1 - 1 / _NOISE_EVERY + 1 / _NOISE_EVERY / _ALPHABET
    jump = 1 / _NOISE_EVERY / _ALPHABET
    return -(stay * math.log(stay) + (_ALPHABET - 1) * jump * math.log(jump))
