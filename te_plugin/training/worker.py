"""What a torchrun rank runs: python -m te_plugin.training.worker RUN_DIR.

The launcher has composed and validated the configuration and written RUN_DIR/config.resolved.yaml; every rank loads that file.
The exit code is the verdict's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from te_plugin.config import load
from te_plugin.errors import user_errors


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m te_plugin.training.worker RUN_DIR", file=sys.stderr)
        return 1
    from te_plugin.training.run import train
    from te_plugin.training.run_dir import CONFIG_FILE

    try:
        return train(load(Path(arguments[0]) / CONFIG_FILE), arguments[0]).exit_code
    except user_errors() as error:
        # Once a machine: most errors are the same on every rank, but a file may be missing on one machine alone.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            rank = os.environ.get("RANK", "0")
            print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
