"""The versions that a result depends on, for provenance."""

import importlib.metadata
import platform
from functools import cache

PACKAGES = ("small-transformer-zoo", "torch", "numpy", "safetensors")


@cache
def versions() -> dict[str, str]:
    """Return name -> version of Python and of the packages that make and write weights."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}
