"""The folder for what can be made again: compiled engines, and copies of remote files."""

import os
from pathlib import Path

from generators.errors import InputError


def cache_folder() -> Path:
    """Return $ZOO_CACHE_DIR, or small-transformer-zoo in the user's cache folder ($XDG_CACHE_HOME, ~/.cache).

    Raises:
        InputError: the user has no home folder, as in some containers.
    """
    if folder := os.environ.get("ZOO_CACHE_DIR"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "small-transformer-zoo"
    except RuntimeError as error:
        raise InputError(f"no cache folder ({error}); set ZOO_CACHE_DIR") from error
