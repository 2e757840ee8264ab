"""Dataclasses to protobuf messages and back, declared by message and compiled once into functions.

A message has the fields of its dataclass, under the same names. The .proto says which of them are repeated
(tuples) and which are optional (None when unset); a declaration names only the fields that need a converter.
Compiled functions cost as much as written-out ones, which reflection at run time would not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeVar

from kvasir.core.errors import ProtocolError

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class Converter(Generic[T]):
    """A value to its form on the wire and back. `decode` raises ProtocolError for a malformed message."""

    encode: Callable[[T], Any]
    decode: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class MessageConverter(Converter[T]):
    """`fill` sets the fields of an empty message, and `add` appends a message to a repeated field. Neither
    copies an encoded message, as assigning or appending one would."""

    fill: Callable[[Any, T], None]
    add: Callable[[Any, T], None]


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """Some fields of a dataclass, held by a message of their own. `fill` writes them into an empty message,
    `decode` returns them by name."""

    fill: Callable[[Any, T], None]
    decode: Callable[[Any], dict[str, Any]]


def message(make: type[T], kind: Any, /, **converters: Converter[Any]) -> MessageConverter[T]:
    """The converter of the dataclass `make` to messages of class `kind`. Raises TypeError unless both have
    the same fields."""
    names, columns = _names(make), _columns(kind, converters)
    if set(names) != set(columns):
        raise TypeError(f"the fields of {make.__name__} and of message {kind.DESCRIPTOR.name} differ")
    arguments = ", ".join(f"{name}={each.encoded}" for name, each in columns.items())
    lines = "\n    ".join(each.assignment for each in columns.values())
    source = f"""
def encode(v):
    return kind({arguments})

def fill(m, v):
    m.SetInParent()
    {lines}

def add(repeated, v):
    repeated.add({arguments})

def decode(m):
    return make({", ".join(columns[name].decoded for name in names)})
"""
    scope = _compiled(source, converters, make=make, kind=kind)
    return MessageConverter(scope["encode"], scope["decode"], scope["fill"], scope["add"])


def part(owner: type[T], kind: Any, **converters: Converter[Any]) -> Part[T]:
    """The fields of the dataclass `owner` that messages of class `kind` hold. Raises TypeError for a field
    that `owner` does not have."""
    columns = _columns(kind, converters)
    if not set(columns) <= set(_names(owner)):
        raise TypeError(f"message {kind.DESCRIPTOR.name} has a field that {owner.__name__} has not")
    lines = "\n    ".join(each.assignment for each in columns.values())
    source = f"""
def fill(m, v):
    m.SetInParent()
    {lines}

def decode(m):
    return dict({", ".join(f"{name}={each.decoded}" for name, each in columns.items())})
"""
    scope = _compiled(source, converters)
    return Part(scope["fill"], scope["decode"])


def enum(name: str, members: Iterable[E], kind: Any, *, unset: bool = False) -> Converter[E | None]:
    """The converter of enum members to those of the wire's enum `kind` with the same name, as in `STOP` and
    `FINISH_REASON_STOP`. Errors name the field `name`. With `unset`, UNSPECIFIED is decoded to None."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.DESCRIPTOR.name).upper()
    numbers = dict(kind.items())
    to_wire = {each: numbers[full] for each in members if (full := f"{prefix}_{each.name}") in numbers}
    from_wire: dict[int, E | None] = {number: each for each, number in to_wire.items()}
    if unset:
        from_wire[numbers[f"{prefix}_UNSPECIFIED"]] = None
    return Converter(lookup(name, to_wire), lookup(name, from_wire))


def lookup(name: str, table: Mapping[Any, T]) -> Callable[[Any], T]:
    """A function that returns the entry of a value, and raises ProtocolError for a value without one."""

    def look_up(value: Any) -> T:
        try:
            return table[value]
        except KeyError:
            raise ProtocolError(f"{name}: unknown value {value}") from None

    return look_up


@dataclass(frozen=True, slots=True)
class _Column:
    """Source text for one field: of a value `v` on the way out, of a message `m` on the way in."""

    encoded: str
    decoded: str
    assignment: str


def _names(owner: type[Any]) -> list[str]:
    return [each.name for each in fields(owner)]


def _columns(kind: Any, converters: dict[str, Converter[Any]]) -> dict[str, _Column]:
    return {each.name: _column(each, converters.get(each.name)) for each in kind.DESCRIPTOR.fields}


def _column(field: Any, converter: Converter[Any] | None) -> _Column:
    name = field.name
    encoded, decoded = f"v.{name}", f"m.{name}"
    if field.is_repeated:
        if converter is not None:
            encoded, decoded = f"map(encode_{name}, {encoded})", f"map(decode_{name}, {decoded})"
        assignment = f"if v.{name}: m.{name}.extend({encoded})"
        if isinstance(converter, MessageConverter):
            assignment = f"for each in v.{name}: add_{name}(m.{name}, each)"
        return _Column(encoded, f"tuple({decoded})", assignment)
    if converter is not None:
        encoded, decoded = f"encode_{name}({encoded})", f"decode_{name}({decoded})"
    if isinstance(converter, MessageConverter):
        assignment = f"fill_{name}(m.{name}, v.{name})"
    elif field.message_type is None:
        assignment = f"m.{name} = {encoded}"
    else:
        assignment = f"m.{name}.CopyFrom({encoded})"
    optional = field.containing_oneof is not None
    if optional or converter is not None:
        assignment = f"if v.{name} is not None: {assignment}"
    if optional:
        encoded = f"None if v.{name} is None else {encoded}"
        decoded = f"{decoded} if m.HasField({name!r}) else None"
    return _Column(encoded, decoded, assignment)


def _compiled(source: str, converters: dict[str, Converter[Any]], **names: Any) -> dict[str, Any]:
    scope: dict[str, Any] = dict(names)
    for name, each in converters.items():
        scope |= {f"encode_{name}": each.encode, f"decode_{name}": each.decode}
        if isinstance(each, MessageConverter):
            scope |= {f"fill_{name}": each.fill, f"add_{name}": each.add}
    exec(source, scope)  # noqa: S102 - made of field names only, as dataclasses make their methods
    return scope
