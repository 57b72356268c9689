"""The error of this package: bad input data, said in the user's terms."""

from __future__ import annotations


class DataError(ValueError):
    """The data cannot be used. The message names the file, document, byte or option at fault and what to change."""


def missing_package(package: str, needed_for: str, extra: str) -> DataError:
    """The error for an optional package that is not installed."""
    return DataError(
        f"{needed_for} needs the package {package!r}, which is not installed: pip install 'te_plugin[{extra}]'"
    )
