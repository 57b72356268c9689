"""Padding rows are zero from the first layer on, so that they reach no amax, no gradient and no expert's weights.

MaxText embeds padding (segment id 0) like any token. RMSNorm, products without bias, SwiGLU and te_plugin's attention all map
zero to zero, so clearing the embedding once is enough. Only done where te_plugin computes the layers.
"""

from __future__ import annotations

import inspect

import jax.numpy as jnp

from te_plugin.maxtext.names import ATTENTION, precision_of


def wrap_decoder(original, signature: inspect.Signature):
    """NNXDecoder.__call__ that clears the embeddings of padding tokens."""

    def decode(self, *args, **kwargs):
        if not (self.config.attention == ATTENTION and precision_of(self.config.quantization) is not None):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        segment_ids = call["decoder_segment_ids"]
        if segment_ids is None or call["decoder_input_embeddings"] is not None or call["multimodal_input"] is not None:
            return original(self, *args, **kwargs)
        embedded = self.embed_tokens(call["shared_embedding"], call["decoder_input_tokens"], call["model_mode"])
        call["decoder_input_embeddings"] = jnp.where(segment_ids[..., None] == 0, 0, embedded)
        return original(*bound.args, **bound.kwargs)

    return decode
