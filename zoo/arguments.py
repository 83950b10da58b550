"""Types of command line arguments; what does not fit ends the command with its usage, one line and exit code 2.

All have an upper bound, far above what makes sense, below what overflows or asks a machine for more than it can have.
"""

import argparse

MOST = 10**9
MOST_WORKERS = 10_000
MOST_RUNS = 10_000
"""Of a measured population: 2 GB of weights and optimizer state; a sweep's populations have hundreds."""
NUMBERS = (1e-9, 1e15)


def positive_integer(text: str) -> int:
    """Read a whole number of 1 or more."""
    return _whole(text, 1, MOST)


def whole_number(text: str) -> int:
    """Read a whole number of 0 or more."""
    return _whole(text, 0, MOST)


def workers(text: str) -> int:
    """Read how many tasks run at once; 0 stands for this process."""
    return _whole(text, 0, MOST_WORKERS)


def population_runs(text: str) -> int:
    """Read how many runs a population has."""
    return _whole(text, 1, MOST_RUNS)


def positive_number(text: str) -> float:
    """Read a number above 0."""
    least, most = NUMBERS
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from {least:g} to {most:g}")
    return value


def _whole(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from {least} to {most}")
    return value
