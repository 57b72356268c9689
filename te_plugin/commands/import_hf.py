"""Turn a Hugging Face llama folder, or a GGUF file, into weights that a recipe can start from (run.init_from=OUT)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

HELP = "import Hugging Face llama weights (folder or .gguf)"
EXAMPLES = """examples:
  te-plugin import-hf ./Llama-3.2-1B weights/llama3_2_1b
  te-plugin import-hf SmolLM2-135M-Instruct.Q4_1.gguf weights/smollm2 --dtype fp32
  te-plugin train recipe=llama3_1_8b run.init_from=weights/llama3_1_8b

OUT/model.yaml holds the sizes in the form of the `model` group; OUT/weights.safetensors holds the weights."""


def add_arguments(parser) -> None:
    parser.add_argument("source", type=Path, metavar="DIR_OR_GGUF")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="type of the stored weights (default bf16)")


def run(args: Namespace) -> int:
    from rich.progress import MofNCompleteColumn, Progress

    from te_plugin.importing import import_weights

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), transient=True) as bar:
        task = bar.add_task("weights", total=None)
        model = import_weights(args.source, args.out, dtype=args.dtype,
                               progress=lambda done, total, name: bar.update(task, completed=done, total=total))
    print(f"{args.out}: {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads}/{model.num_kv_heads} heads, "
          f"vocabulary {model.vocab_size}; start from it with run.init_from={args.out}")
    return 0
