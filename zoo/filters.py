"""Conditions on columns, with the meaning that pyarrow and datasets give them."""

import difflib
import functools
import operator as python
import re
from collections.abc import Callable, Collection, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeGuard

import pyarrow as pa
import pyarrow.compute as pc

from zoo.errors import DatasetError

Condition: TypeAlias = tuple[str, str, Any]
Filters: TypeAlias = str | Condition | Sequence[str | Condition] | Sequence[Sequence[str | Condition]]
"""One condition, a list of conditions, all of which hold, or a list of such lists, one of which holds. A condition is
(column, operator, value) or a text that `parse_filter` reads. A null fulfils no condition but "not in"."""

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
INT64_MAX = 2**63 - 1
EXAMPLE = '[("test_accuracy", ">=", 0.9)] or "test_accuracy>=0.9"'
FEW_VALUES = 20
"""A text column of at most so many values is a choice: a value that no row has is a mistake."""
LISTED_VALUES = 10
_TEXT = re.compile(rf"\s*(\w+)(?:\s*({'|'.join(COMPARISONS)})\s*|\s+(not\s+in|in)\s+)([^\s=<>!].*?)\s*")


def parse_filter(text: str) -> Condition:
    """Read a condition such as "test_accuracy>=0.9", "epoch_label==best" or "optimizer in adam,sgd".

    The value stays text until it meets its column, see `expression`.

    Raises:
        DatasetError: `text` is no condition.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise DatasetError(f"filter {text!r}: expected column, operator and value, for example test_accuracy>=0.9")
    column, comparison, membership, value = match.groups()
    if comparison:
        return column, comparison, value
    return column, " ".join(membership.split()), [part.strip() for part in value.split(",")]


def expression(filters: Filters, schema: pa.Schema) -> pc.Expression:
    """Return filters as a pyarrow expression; values given as text take the type of their column.

    Raises:
        DatasetError: these are no filters, no such column or operator, or a value that cannot be compared with the
            column.
    """
    alternatives = []
    for group in _groups(filters):
        conditions = [_condition(name, operator, value, schema) for name, operator, value in group]
        alternatives.append(functools.reduce(python.and_, conditions))
    return functools.reduce(python.or_, alternatives)


def require_known_values(filters: Filters, table: pa.Table) -> None:
    """Refuse a value that a text column shall equal, alone or `in` a list, and none of its rows has, if it has few.

    Raises:
        DatasetError: names the values that the column has.
    """
    for name, operator, value in (condition for group in _groups(filters) for condition in group):
        is_choice = pa.types.is_string(table.schema.field(name).type) and not name.endswith("_id")
        if operator not in ("==", "=", "in") or not is_choice:
            continue
        known = sorted(table[name].unique().drop_null().to_pylist())
        wanted = map(str, value if operator == "in" else [value])
        unknown = [each for each in wanted if each not in known]
        if unknown and 0 < len(known) <= FEW_VALUES:
            more = " ..." if len(known) > LISTED_VALUES else ""
            raise DatasetError(
                f"filters: {name}: found {unknown[0]!r}, which no row has, expected one of "
                f"{', '.join(known[:LISTED_VALUES])}{more}"
            )


def _groups(filters: Filters) -> list[list[Condition]]:
    """Return the conditions as alternatives (or) of lists (and), texts read."""
    given: Any = [filters] if _is_condition(filters) else filters
    if isinstance(given, list | tuple) and given:
        if all(map(_is_condition, given)):
            given = [given]
        if all(isinstance(group, list | tuple) and group and all(map(_is_condition, group)) for group in given):
            return [[parse_filter(each) if isinstance(each, str) else each for each in group] for group in given]
    raise DatasetError(f"filters: found {filters!r}, expected conditions, for example {EXAMPLE}")


def _is_condition(value: Any) -> TypeGuard[str | Condition]:
    """Tell a condition from a list of them: its first part is a bare name, which no condition's text is."""
    if isinstance(value, list | tuple):
        return len(value) == 3 and all(isinstance(part, str) for part in value[:2]) and value[0].isidentifier()
    return isinstance(value, str)


def _condition(name: str, operator: str, value: Any, schema: pa.Schema) -> pc.Expression:
    one_of("filters", name, schema.names)
    one_of(f"filters: {name}: operator", operator, [*COMPARISONS, *MEMBERSHIPS])
    kind = schema.field(name).type
    if operator not in MEMBERSHIPS:
        return COMPARISONS[operator](pc.field(name), _converted(name, value, kind))
    if isinstance(value, str):
        raise DatasetError(f"filters: {name} {operator}: found the text {value!r}, expected a list of values")
    if not isinstance(value, Collection):
        raise DatasetError(f"filters: {name} {operator}: found {value!r}, expected a list of values")
    values = pa.array([_converted(name, each, kind) for each in value], None if len(value) else kind)
    return pc.field(name).isin(values) if operator == "in" else ~pc.field(name).isin(values)


def _converted(name: str, value: Any, kind: pa.DataType) -> Any:
    """Return a value that can be compared with a column: text for text, numbers for numbers, or texts of such."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if pa.types.is_string(kind) and (isinstance(value, str) or number):
        return str(value)
    if not pa.types.is_string(kind):
        if isinstance(value, str):
            try:
                value = float(value) if pa.types.is_floating(kind) else int(value)
            except ValueError:
                number = False
            else:
                number = True
        too_large = isinstance(value, int) and abs(value) > INT64_MAX
        if number and not too_large and value == value:  # NaN, which equals nothing, fulfils no condition
            return value
    raise DatasetError(f"filters: {name}: found {value!r}, expected a value of type {kind}")


def one_of(what: str, found: str, known: Sequence[str]) -> None:
    """Raise DatasetError unless `found` is one of `known`; it suggests the nearest."""
    if found not in known:
        near = difflib.get_close_matches(str(found), known, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DatasetError(f"{what}: found {found!r}, expected one of {', '.join(known)}{hint}")
