"""Compare two run directories: what differs in their configurations, the gap between their loss curves, and a picture."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from te_plugin.config import ConfigError

HELP = "compare two runs: configuration, loss gap, picture"
EXAMPLES = """examples:
  te-plugin compare runs/llama_tiny-20260101-120000 runs/llama_tiny-20260101-121500
  te-plugin compare RUN_A RUN_B --out megatron-against-maxtext"""


def add_arguments(parser) -> None:
    parser.add_argument("run_a", type=Path, metavar="RUN_A")
    parser.add_argument("run_b", type=Path, metavar="RUN_B")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="where compare.json and compare.png go (default: RUN_B/compare-RUN_A)")


def run(args: Namespace) -> int:
    for run_dir in (args.run_a, args.run_b):
        require_run_dir(run_dir)
    from te_plugin.convergence.compare import compare_runs

    out = args.out or args.run_b / f"compare-{args.run_a.resolve().name}"
    try:
        comparison = compare_runs(args.run_a, args.run_b, out)
    except ValueError as error:  # two runs that cannot be compared
        raise ConfigError(str(error)) from error
    except OSError as error:
        # compare_runs's own FileNotFoundError has no number: it is about RUN_A or RUN_B.
        raise ConfigError(str(error) if error.errno is None else f"{out} cannot be written: {error.strerror}; give another "
                          f"folder with --out") from error
    print("\n".join([f"{args.run_a} -> {args.run_b}", *comparison.lines(), f"picture: {out / 'compare.png'}"]))
    return 0


def require_run_dir(path: Path) -> None:
    """ConfigError unless the folder holds a run."""
    if not (path / "config.resolved.yaml").is_file():
        what = "no such folder" if not path.is_dir() else "it holds no config.resolved.yaml"
        raise ConfigError(f"{path} is no run directory: {what}; give a folder that te-plugin train made")
