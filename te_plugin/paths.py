"""Where configs/ and recipes/ are: inside the package when installed from a wheel, beside it in a source checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent


def configs_dir() -> Path:
    """The folder of the Hydra groups."""
    return _data_dir("configs", marker="config.yaml")


def recipes_dir() -> Path:
    """The folder of the recipes' READMEs, golden curves and launch files."""
    return _data_dir("recipes")


def _data_dir(name: str, marker: str = "") -> Path:
    places = (PACKAGE_DIR / name, PACKAGE_DIR.parent / name)
    for place in places:
        if (place / marker).exists():
            return place
    raise FileNotFoundError(f"te_plugin's {name}/ is neither at {places[0]} nor at {places[1]}: "
                            f"the installation is incomplete; reinstall te_plugin")
