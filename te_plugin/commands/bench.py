"""Measure our kernels beside every peer that this machine has: speed and correctness in one table, a JSON file and a picture.

Candidates take turns; times are medians with quartiles, errors are against float64. Files go to runs/bench/<machine>, or with
--save to docs/results/<machine>, where the tables of the README are made from.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path

from te_plugin.bench import BENCHMARKS, Options, module_of
from te_plugin.commands.report import console
from te_plugin.config import ConfigError

HELP = "side-by-side benchmarks"
EXAMPLES = """examples:
  te-plugin bench attention
  te-plugin bench attention --case 8x256 --dtype bf16
  te-plugin bench attention --save --threads 2
  te-plugin bench layer --case packed --seconds 2"""


def add_arguments(parser) -> None:
    parser.add_argument("benchmark", nargs="?", choices=tuple(BENCHMARKS), help="which benchmark (default: all of them)")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be given more than once")
    parser.add_argument("--dtype", help="only this dtype, for example bf16")
    parser.add_argument("--seconds", type=float, default=3.0,
                        help="time for the turns of one op and case, above 0; every candidate takes a few (default: 3)")
    parser.add_argument("--threads", type=int, help="CPU threads of torch and of our kernels (default: all)")
    parser.add_argument("--save", action="store_true", help="write to docs/results/<machine> instead of runs/bench/<machine>")


def run(args: Namespace) -> int:
    if args.threads is not None:
        set_threads(args.threads)
    options = Options(tuple(args.case), args.dtype, args.seconds)
    out = console()
    root = Path("docs/results" if args.save else "runs/bench")
    try:
        root.mkdir(parents=True, exist_ok=True)  # before anything is measured for it
    except OSError as error:
        raise ConfigError(f"{root} cannot be made: {error.strerror}; start bench where you may write") from error
    import torch

    has_gpu = torch.cuda.is_available()
    for name in (args.benchmark,) if args.benchmark else BENCHMARKS:
        module = module_of(name, has_gpu)
        if module is None:
            if args.benchmark:
                raise ConfigError(f"bench {name} measures GPU kernels, and torch sees no GPU on this machine; run it on one")
            out.print(f"bench {name}: skipped, it needs a GPU")
            continue
        report = importlib.import_module(module).run(options)
        report.print(out)
        for path in report.write(root):
            out.print(f"wrote {path}")
    return 0


def set_threads(threads: int) -> None:
    """torch and the compiled library alike, so that the comparison is one of kernels."""
    if threads < 1:
        raise ConfigError(f"--threads {threads}: at least 1")
    import torch

    from te_plugin import ffi

    torch.set_num_threads(threads)
    ffi.function("cpu", "set_num_threads")(threads)
