"""Compile the fused engine at first use, into a cache that all of a user's processes share.

A library's name is a hash of everything that it is made from: the sources, the flags, and the macros that the compiler
predefines under these flags, which tell the compiler, its version and the processor's features. A library is written
under a private name and renamed, so processes that start at once each compile, and any of their files serves all.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from generators.cache import cache_folder
from generators.errors import InputError

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 300
"""Seconds that a build may take."""


class FusedUnavailableError(RuntimeError):
    """The fused engine cannot be built or does not serve this machine; the message is one line and says why."""


def find_compiler() -> list[str]:
    """Return the words of $CXX if it is set, else the first of c++, g++, clang++ on the PATH.

    Raises:
        FusedUnavailableError: there is none, or $CXX cannot be split into words.
    """
    words = os.environ.get("CXX", "")
    try:
        given = shlex.split(words)
    except ValueError as error:
        raise FusedUnavailableError(f"no C++ compiler: CXX is {words!r} ({error}); mend it or unset it") from error
    for name in given[:1] or COMPILERS:
        if path := shutil.which(name):
            return [path, *given[1:]]
    raise FusedUnavailableError(
        f"no C++ compiler: found none of {', '.join(given[:1] or COMPILERS)}; install one or set CXX"
    )


def build(definitions: Sequence[str], sources: Path = SOURCES) -> Path:
    """Return the library made from a folder's engine.cpp, compiling it if the cache lacks it.

    Args:
        definitions: preprocessor flags, such as -DFUSED_TASK=Images.
        sources: folder with engine.cpp and its headers.

    Raises:
        FusedUnavailableError: no compiler, a failed build, or a cache folder that cannot be read or written.
    """
    compiler = find_compiler()
    flags = [*processor_flags(compiler), *FLAGS, *definitions]
    try:
        folder = cache_folder()
    except InputError as error:
        raise FusedUnavailableError(str(error)) from error
    library = folder / f"fused-{_digest(compiler, flags, sources)}.so"
    try:
        if library.exists():
            return library
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:
            output = Path(private) / library.name
            _run([*compiler, *flags, str(sources / "engine.cpp"), "-o", str(output), "-pthread"])
            output.replace(library)
    except OSError as error:
        raise FusedUnavailableError(f"cache {folder}: {error.strerror}; set ZOO_CACHE_DIR") from error
    return library


def processor_flags(compiler: Sequence[str]) -> list[str]:
    """Return the flags for this very processor, or none where the compiler knows no such flag."""
    for flag in ("-march=native", "-mcpu=native"):
        try:
            _predefined_macros(compiler, [flag])
        except FusedUnavailableError:
            continue
        return [flag]
    return []


def _digest(compiler: Sequence[str], flags: Sequence[str], sources: Path) -> str:
    sha = hashlib.sha256("\0".join(flags).encode())
    sha.update(_predefined_macros(compiler, flags).encode())
    for path in sorted([*sources.glob("*.h"), *sources.glob("*.cpp")]):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:24]


def _predefined_macros(compiler: Sequence[str], flags: Sequence[str]) -> str:
    return _run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise FusedUnavailableError(f"{command[0]} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FusedUnavailableError(f"{command[0]} failed: {error}") from error
    return done.stdout
