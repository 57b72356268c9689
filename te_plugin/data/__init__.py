"""Documents, tokenizers and packing. Framework-free: NumPy only, other libraries are imported where a source needs
them.

`build_data(cfg)` gives a run its rows; the functions below it are useful on their own. docs/data.md explains sources,
formats and resuming.
"""

from te_plugin.data.batch import Batch, PaddedBatch, to_bshd
from te_plugin.data.context_parallel import CpShard, rope_indices, split_for_cp
from te_plugin.data.dataset import Data, build_data
from te_plugin.data.documents import TextSource, byte_entropy, open_source
from te_plugin.data.errors import DataError
from te_plugin.data.indexed import TokenStore, read_indexed, store_of, write_indexed
from te_plugin.data.packing import Pack, pack
from te_plugin.data.segments import (
    cu_seqlens_from_positions,
    cu_seqlens_from_segment_ids,
    cu_seqlens_padded_from_segment_ids,
    make_labels,
    normalise_cu_seqlens,
    segment_positions,
)
from te_plugin.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "CpShard",
    "Data",
    "DataError",
    "Pack",
    "PaddedBatch",
    "TextSource",
    "TokenStore",
    "Tokenizer",
    "build_data",
    "byte_entropy",
    "cu_seqlens_from_positions",
    "cu_seqlens_from_segment_ids",
    "cu_seqlens_padded_from_segment_ids",
    "load_tokenizer",
    "make_labels",
    "normalise_cu_seqlens",
    "open_source",
    "pack",
    "read_indexed",
    "rope_indices",
    "segment_positions",
    "split_for_cp",
    "store_of",
    "to_bshd",
    "write_indexed",
]
