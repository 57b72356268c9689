"""One module a command. Each has HELP (one line), EXAMPLES, add_arguments(parser) and run(args) -> exit code."""

from __future__ import annotations

import importlib.util

# In the order of --help. Commands whose module is not part of the installation are not offered.
COMMANDS = {
    "train": "te_plugin.commands.train",
    "explain": "te_plugin.commands.explain",
    "doctor": "te_plugin.commands.doctor",
    "check": "te_plugin.commands.check",
    "accept": "te_plugin.commands.accept",
    "compare": "te_plugin.commands.compare",
    "bench": "te_plugin.commands.bench",
    "sync": "te_plugin.commands.sync",
    "import-hf": "te_plugin.commands.import_hf",
}


def available() -> dict[str, str]:
    """Command -> module, of those that exist."""
    return {name: module for name, module in COMMANDS.items() if importlib.util.find_spec(module) is not None}
