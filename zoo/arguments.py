"""Types of command line arguments; what does not fit ends the command with its usage, one line and exit code 2."""

import argparse

DIGITS = 9
"""Of the greatest counts and rates that make sense; and 10^-9 is the smallest rate."""
QUOTED = 50


def positive_integer(text: str) -> int:
    """Read a whole number of 1 or more."""
    return int(_positive(text, int))


def positive_number(text: str) -> float:
    """Read a finite number above 0."""
    return _positive(text, float)


def whole_number(text: str) -> int:
    """Read a whole number of 0 or more."""
    if not text.isdecimal() or len(text) > DIGITS:
        raise argparse.ArgumentTypeError(
            f"found {text[:QUOTED]!r}, expected a whole number of 0 or more, of at most {DIGITS} digits"
        )
    return int(text)


def _positive(text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 10.0**-DIGITS < value < 10.0**DIGITS:
        expected = "a whole number of 1 or more" if kind is int else "a number above 0"
        raise argparse.ArgumentTypeError(f"found {text[:QUOTED]!r}, expected {expected}, of at most {DIGITS} digits")
    return value
