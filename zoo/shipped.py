"""Folders that ship with the package: configs/ and cards/, inside an installed package or beside a source tree's."""

from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Return the folder `name` of this installation."""
    inside = Path(__file__).parent / name
    return inside if inside.is_dir() else Path(__file__).parents[1] / name
