"""Conditions on columns, with the meaning that pyarrow and datasets give them."""

import functools
import operator as python
import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from zoo.errors import DatasetError

Condition: TypeAlias = tuple[str, str, Any]
Filters: TypeAlias = Sequence[Condition] | Sequence[Sequence[Condition]]
"""A list of (column, operator, value), all of which hold, or a list of such lists, one of which holds. A null fulfils
no condition but "not in"."""

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": python.eq,
    "=": python.eq,
    "!=": python.ne,
    "<=": python.le,
    ">=": python.ge,
    "<": python.lt,
    ">": python.gt,
}
MEMBERSHIPS = ("in", "not in")
_TEXT = re.compile(rf"\s*(\w+)(?:\s*({'|'.join(COMPARISONS)})\s*|\s+(not\s+in|in)\s+)([^\s=<>!].*?)\s*")


def parse_filter(text: str) -> Condition:
    """Read a condition such as "test_accuracy>=0.9", "epoch_label==best" or "optimizer in adam,sgd".

    The value stays text until it meets its column, see `expression`.

    Raises:
        DatasetError: `text` is no condition.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise DatasetError(f"--filter {text!r}: expected column, operator and value, for example test_accuracy>=0.9")
    column, comparison, membership, value = match.groups()
    if comparison:
        return column, comparison, value
    return column, " ".join(membership.split()), [part.strip() for part in value.split(",")]


def expression(filters: Filters, schema: pa.Schema) -> pc.Expression:
    """Return filters as a pyarrow expression; values given as text take the type of their column.

    Raises:
        DatasetError: no such column or operator, or a value that cannot be compared with the column.
    """
    groups: Any = [filters] if isinstance(filters[0][0], str) else filters
    alternatives = []
    for group in groups:
        conditions = [_condition(name, operator, value, schema) for name, operator, value in group]
        alternatives.append(functools.reduce(python.and_, conditions))
    return functools.reduce(python.or_, alternatives)


def _condition(name: str, operator: str, value: Any, schema: pa.Schema) -> pc.Expression:
    one_of("filters", name, schema.names)
    one_of(f"filters: {name}: operator", operator, [*COMPARISONS, *MEMBERSHIPS])
    kind = schema.field(name).type
    if operator not in MEMBERSHIPS:
        return COMPARISONS[operator](pc.field(name), _converted(name, value, kind))
    if isinstance(value, str):
        raise DatasetError(f"filters: {name} {operator}: found the text {value!r}, expected a list of values")
    values = pa.array([_converted(name, each, kind) for each in value], None if value else kind)
    return pc.field(name).isin(values) if operator == "in" else ~pc.field(name).isin(values)


def _converted(name: str, value: Any, kind: pa.DataType) -> Any:
    """Return a value that can be compared with a column: text for text, numbers for numbers, or texts of such."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if pa.types.is_string(kind) and (isinstance(value, str) or number):
        return str(value)
    if not pa.types.is_string(kind):
        if number:
            return value
        if isinstance(value, str):
            try:
                return float(value) if pa.types.is_floating(kind) else int(value)
            except ValueError:
                pass
    raise DatasetError(f"filters: {name}: found {value!r}, expected a value of type {kind}")


def one_of(what: str, found: str, known: Sequence[str]) -> None:
    """Raise DatasetError unless `found` is one of `known`."""
    if found not in known:
        raise DatasetError(f"{what}: found {found!r}, expected one of {', '.join(known)}")
