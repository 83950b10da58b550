"""Conditions on columns, with the meaning that pyarrow and datasets give them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zoo.errors import DatasetError

Condition: TypeAlias = tuple[str, str, Any]
Filters: TypeAlias = Sequence[Condition] | Sequence[Sequence[Condition]]
"""A list of (column, operator, value), all of which hold, or a list of such lists, one of which holds. A null fulfils
no condition."""

OPERATORS = ("==", "=", "!=", "<", "<=", ">", ">=", "in", "not in")
_AS_TEXT = (" not in ", " in ", "==", "!=", "<=", ">=", "<", ">", "=")


def parse_filter(text: str) -> Condition:
    """Read a condition such as "test_accuracy>=0.9", "epoch_label==best" or "optimizer in adam,sgd".

    The value stays text until it meets its column, see `expression`.

    Raises:
        DatasetError: `text` is no condition.
    """
    for operator in _AS_TEXT:
        column, found, value = text.partition(operator)
        if found and column.strip() and value.strip():
            operator = operator.strip()
            values = [part.strip() for part in value.split(",")]
            return column.strip(), operator, values if operator.endswith("in") else value.strip()
    raise DatasetError(f"--filter {text!r}: expected column, operator and value, for example test_accuracy>=0.9")


def expression(filters: Filters, schema: pa.Schema) -> pc.Expression:
    """Return filters as a pyarrow expression; values given as text take the type of their column.

    Raises:
        DatasetError: no such column or operator, or a value that cannot be compared with the column.
    """
    groups: Any = [filters] if isinstance(filters[0][0], str) else filters
    return pq.filters_to_expression([[_typed(condition, schema) for condition in group] for group in groups])


def _typed(condition: Condition, schema: pa.Schema) -> Condition:
    name, operator, value = condition
    one_of("filters", name, schema.names)
    one_of(f"filters: {name}: operator", operator, OPERATORS)
    kind, several = schema.field(name).type, operator.endswith("in")
    values = list(value) if several and not isinstance(value, str) else [value]
    if several and isinstance(value, str):
        raise DatasetError(f"filters: {name} {operator}: found the text {value!r}, expected a list of values")
    convert: Any = str if pa.types.is_string(kind) else float if pa.types.is_floating(kind) else int
    try:
        converted = [convert(v) if isinstance(v, str) or convert is str else v for v in values]
        pa.array(converted, from_pandas=False).cast(kind if converted else pa.null())
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DatasetError(f"filters: {name}: found {value!r}, expected a value of type {kind}") from error
    if None in converted:
        raise DatasetError(f"filters: {name}: found None, expected a value; nulls fulfil no condition")
    return name, operator, set(converted) if several else converted[0]


def one_of(what: str, found: str, known: Sequence[str]) -> None:
    """Raise DatasetError unless `found` is one of `known`."""
    if found not in known:
        raise DatasetError(f"{what}: found {found!r}, expected one of {', '.join(known)}")
