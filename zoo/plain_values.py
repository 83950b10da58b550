"""Plain values, as a YAML file holds them -> frozen dataclasses. Every unknown key and wrong type is one line."""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from generators.errors import InputError
from zoo.errors import ConfigError, one_line

INTEGER_BITS = 63
"""Without the sign; numbers end in int64 columns."""
NAMES = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
    type(None): ("nothing", "nothing"),
}
"""Type of a field -> what errors call one of its values, and several."""
MOST_VALUES = 1_000_000
"""In a file, with its aliases written out: ten lines of them can stand for more than memory holds."""
LONGEST_NUMBER = 1000
"""Characters of a whole number in a file."""
LONGEST_QUOTE = 200
LONGEST_REASON = 600
"""Characters of a value that a message quotes, and of what the YAML parser says."""


def from_yaml(text: str, where: str) -> Any:
    """Return the plain values of a YAML text; `where` begins the message of the ConfigError for one that is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    # PyYAML lets through what int(), date(), chr() and its own tables say of `!!int abc`, 2020-99-99, "\UFFFFFFFF" or
    # `!!bool abc`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}not valid YAML: {shown(str(error), LONGEST_REASON)}") from error


def build(cls: type, content: Any, prefix: str) -> Any:
    """Make a frozen dataclass from plain values; unknown keys and wrong types are errors that name the field."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'top level'}: found {shown(repr(content))}, expected keys and values"
        )
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{prefix}{shown(str(key))}: unknown key; {hint}")
    for f in dataclasses.fields(cls):
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and f.name not in content:
            raise ConfigError(f"{prefix}{f.name}: missing; it has no default")
    values = {key: _convert(value, hints[key], f"{prefix}{key}") for key, value in content.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check a plain value against a type hint and return it in that type (lists become tuples, 1 becomes 1.0)."""
    if hint is Any:
        return value
    if type(value) is int and value.bit_length() > INTEGER_BITS:
        raise ConfigError(
            f"{where}: found a whole number of {value.bit_length()} bits, expected one that fits into "
            f"{INTEGER_BITS} bits and a sign"
        )
    if get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            if get_origin(option) is tuple and isinstance(value, list | tuple):
                return _convert(value, option, where)  # its errors name the item
            try:
                return _convert(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where}: found {shown(repr(value))}, expected {_expected(hint)}")
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: found {shown(repr(value))}, expected {_expected(hint)}")
        return tuple(_convert(item, get_args(hint)[0], f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, f"{where}.")
    if hint is float and type(value) is int:
        return float(value)
    if (hint is type(None) and value is None) or type(value) is hint:
        if hint is float and not abs(value) < float("inf"):
            raise ConfigError(f"{where}: found {value}, expected a finite number")
        return value
    raise ConfigError(f"{where}: found {shown(repr(value))}, expected {_expected(hint)}")


def _expected(hint: Any, several: bool = False) -> str:
    """Return what errors call the values of a type hint: one of them, or several in a list."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_expected(option, several) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {_expected(get_args(hint)[0], several=True)}"
    return NAMES.get(hint, ("keys and values", "groups of keys and values"))[several]


def shown(text: str, longest: int = LONGEST_QUOTE) -> str:
    """Return what a message quotes, on one line and cut where it is long."""
    text = one_line(text)
    return text if len(text) <= longest else f"{text[:longest]}..."


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, with YAML 1.2's numbers (1e-3 is a number), without repeated and merged keys."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values_of(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"with its aliases written out, found more than {MOST_VALUES} values")
        return node

    def construct_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > LONGEST_NUMBER:  # Python can't print a hexadecimal one of many thousand digits
            raise yaml.YAMLError(
                f"number of {len(node.value)} characters, line {node.start_mark.line + 1}, expected at most "
                f"{LONGEST_NUMBER}"
            )
        return self.construct_yaml_int(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(
                    f"merge key <<, line {key_node.start_mark.line + 1}: no merge keys here; write the keys themselves"
                )
        super().flatten_mapping(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep=deep)  # refuses what is no mapping, and keys without a hash
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} stands twice, line {key_node.start_mark.line + 1}")
            seen.add(key)
        return mapping


def _values_of(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return how many values a node stands for with its aliases written out; infinitely many if it holds itself."""
    if node not in known:
        known[node] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = itertools.chain.from_iterable(parts) if isinstance(node, yaml.MappingNode) else parts
        known[node] = 1 + sum(_values_of(part, known) for part in nodes)
    return known[node]


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
