"""The command line: one parser, one file a command in te_plugin/commands, one place where an error becomes a message.

Exit codes: 0 done or PASS; 1 an error, a user's mistake or FAIL; 2 INCONCLUSIVE or SUSPECT. A user's mistake is one message on
stderr and no traceback; anything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from te_plugin import __version__
from te_plugin.commands import available
from te_plugin.errors import user_errors

EPILOG = "Start with:\n  te-plugin doctor\n  te-plugin explain recipe=llama_tiny\n  te-plugin train recipe=llama_tiny"
DESCRIPTION = "FP8 attention and linear kernels for Megatron-Core and MaxText, with recipes that check their own loss curves."


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors exit with 1: 2 means that a run ended without a clear verdict."""

    def error(self, message: str):
        print(f"te-plugin: {message}\nSee {self.prog} --help", file=sys.stderr)
        raise SystemExit(1)


def build_parser() -> Parser:
    parser = Parser(prog="te-plugin", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"te-plugin {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, module_name in available().items():
        module = importlib.import_module(module_name)
        sub = commands.add_parser(name, help=module.HELP, description=module.__doc__, epilog=module.EXAMPLES,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a path that this terminal's encoding cannot show must not end a run
    parser = build_parser()
    try:
        args, rest = parser.parse_known_args(argv)
        if rest:  # overrides may stand on both sides of an option
            unknown = [text for text in rest if text.startswith("-") or not hasattr(args, "overrides")]
            if unknown:
                args.parser.error(f"unknown argument {unknown[0]}")
            args.overrides += rest
    except SystemExit as stop:  # --help, --version and usage errors
        return stop.code or 0
    try:
        return args.run(args)
    except user_errors() as error:
        print(f"te-plugin {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"te-plugin {args.command}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
