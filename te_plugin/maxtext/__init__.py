"""te_plugin inside the unmodified `maxtext` package: attention, quantisation and grouped GEMM on te_plugin's kernels.

    import te_plugin.maxtext
    te_plugin.maxtext.install()
    config = pyconfig.initialize(argv, config_class=te_plugin.maxtext.TePluginConfig)

with attention=te_plugin and quantization=te_plugin_fp8_current in argv;

or, as one command, `python -m te_plugin.maxtext.train CONFIG.yml key=value ...`. See docs/adapters.md.
"""

from __future__ import annotations

from te_plugin.maxtext.seams import SeamError, install

__all__ = ["SeamError", "TePluginConfig", "install"]


def __getattr__(name: str):
    if (
        name == "TePluginConfig"
    ):  # importing MaxText's own configuration takes seconds, so it waits until it is asked for
        from te_plugin.maxtext.config import TePluginConfig

        return TePluginConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
