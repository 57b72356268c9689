"""install(): puts te_plugin behind five functions and methods of MaxText, after checking that they are what it expects.

MaxText has no registry for attention kernels or quantisation; it looks these five up by attribute each time it calls them, so
they can be replaced from outside. Every replacement calls the original unless the configuration names te_plugin.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass

VERSIONS = ((0, 2, 5), (0, 3, 0))  # from, up to but without
MARK = "__te_plugin__"


class SeamError(RuntimeError):
    """The installed maxtext is not one that te_plugin knows how to enter. Nothing was changed."""


@dataclass(frozen=True)
class Seam:
    """One function of MaxText that is wrapped.

    where: module; path: attribute path in it; needs: the parameters the wrapper reads, which must exist under these names.
    wrap: module and name of the function that makes the wrapper from (original, signature).
    """

    where: str
    path: str
    needs: tuple[str, ...]
    wrap: str

    def holder(self):
        found = importlib.import_module(self.where)
        *parents, name = self.path.split(".")
        for parent in parents:
            found = getattr(found, parent)
        return found, name

    def __str__(self) -> str:
        return f"{self.where}.{self.path}"


SEAMS = (
    Seam(
        "maxtext.layers.attention_op",
        "AttentionOp.apply_attention",
        (
            "self",
            "query",
            "key",
            "value",
            "decoder_segment_ids",
            "lengths",
            "model_mode",
            "use_ragged_attention",
            "previous_chunk",
            "bidirectional_mask",
            "sinks",
            "indexer_mask",
            "compressed_mask",
            "record_max_logits",
            "decoder_segment_ids_kv",
            "pad_kv_total",
            "compress_ratio",
        ),
        "te_plugin.maxtext.attention:wrap_attention",
    ),
    Seam(
        "maxtext.layers.quantizations",
        "configure_quantization",
        ("config", "quant_mode_str"),
        "te_plugin.maxtext.quantization:wrap_configure",
    ),
    Seam(
        "maxtext.kernels.megablox",
        "gmm",
        (
            "lhs",
            "rhs",
            "group_sizes",
            "preferred_element_type",
            "group_offset",
            "existing_out",
            "transpose_rhs",
            "lhs_quantize_dtype",
            "rhs_quantize_dtype",
            "use_qwix_quantization",
            "use_tokamax_backend",
            "weight_gather_axes",
            "partial_sum",
        ),
        "te_plugin.maxtext.experts:wrap_gmm",
    ),
    Seam(
        "maxtext.layers.nnx_decoders",
        "NNXDecoder.__call__",
        (
            "self",
            "shared_embedding",
            "decoder_input_tokens",
            "decoder_segment_ids",
            "model_mode",
            "multimodal_input",
            "decoder_input_embeddings",
        ),
        "te_plugin.maxtext.padding:wrap_decoder",
    ),
    Seam(
        "maxtext.common.data_loader",
        "DataLoader.load_next_batch_pre_sharding",
        ("self",),
        "te_plugin.maxtext.segments:wrap_loader",
    ),
)


def install() -> None:
    """Wrap MaxText's seams; a second call does nothing. SeamError when the installed version or a signature does not fit.

    Everything is checked before anything is changed. Call it before a model is created; import order does not matter.
    """
    _check_version()
    found = []
    for seam in SEAMS:
        original = _find(seam)
        if not getattr(original, MARK, False):
            found.append((seam, original, _check_signature(seam, original)))
    made = [(seam, _wrapper(seam, original, signature)) for seam, original, signature in found]
    for seam, wrapper in made:
        setattr(*seam.holder(), wrapper)


def _wrapper(seam: Seam, original: Callable, signature: inspect.Signature) -> Callable:
    module, name = seam.wrap.split(":")
    wrapper = functools.wraps(original)(getattr(importlib.import_module(module), name)(original, signature))
    setattr(wrapper, MARK, True)
    return wrapper


def is_installed() -> bool:
    """Whether every seam is wrapped."""
    return all(getattr(_find(seam), MARK, False) for seam in SEAMS)


def _check_version() -> None:
    try:
        version = importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        raise SeamError("maxtext is not installed: pip install 'te_plugin[maxtext]'") from None
    low, high = VERSIONS
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not low <= numbers < high:
        raise SeamError(
            f"maxtext {version} is installed, te_plugin knows {_text(low)} up to (not including) {_text(high)}: "
            f"install one of those"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _find(seam: Seam) -> Callable:
    try:
        holder, name = seam.holder()
        return getattr(holder, name)
    except (ImportError, AttributeError) as error:
        raise SeamError(
            f"{seam} does not exist in maxtext {importlib.metadata.version('maxtext')} ({error}): te_plugin "
            "was written "
            f"for another version; nothing was changed"
        ) from error


def _check_signature(seam: Seam, original: Callable) -> inspect.Signature:
    signature = inspect.signature(original)
    missing = [name for name in seam.needs if name not in signature.parameters]
    known = set(seam.needs) | _HARMLESS.get(seam.path, set())
    new = [
        p.name
        for p in signature.parameters.values()
        if p.name not in known and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing or new:
        what = " and ".join(
            filter(None, (f"{', '.join(missing)} gone" if missing else "", f"{', '.join(new)} new" if new else ""))
        )
        raise SeamError(
            f"{seam} has other parameters in maxtext {importlib.metadata.version('maxtext')} ({what}): te_plugin was "
            f"written for another version; nothing was changed"
        )
    return signature


# Required parameters that the wrappers may ignore: einsum functions for the framework's own product.
_HARMLESS = {
    "AttentionOp.apply_attention": {"segment_positions", "qk_product_einsum", "wv_product_einsum"},
    "NNXDecoder.__call__": {"decoder_positions"},
}
