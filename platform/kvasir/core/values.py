"""Frozen values with minimal cost: some are created for every token of every stream.

`dataclass(frozen=True)` assigns each field through a guarded call, which for a Delta takes longer than all
other work of the router on it. Structs of msgspec are made and encoded in half of the instructions of
dataclasses (by hand), and the garbage collector does not visit those of numbers and text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast, dataclass_transform

import msgspec

T = TypeVar("T")
_Fields = list[tuple[str, Any] | tuple[str, Any, Any]]

_NOT_TAKEN_OVER = frozenset(
    ("__dict__", "__weakref__", "__init__", "__eq__", "__repr__", "__hash__", "__match_args__")
)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make `cls`, which is written as a dataclass, a frozen struct. It compares and hashes by its fields, and
    encoders and the functions of `dataclasses` take it for a dataclass. Raise TypeError for a field with an
    option that structs do not have."""
    written = dataclasses.fields(dataclass(cls))  # type: ignore[arg-type]  # made a dataclass here
    for each in written:
        if each.kw_only or not (each.init and each.repr and each.compare):
            raise TypeError(
                f"{cls.__name__}.{each.name}: a field of a value has a default, and no other option"
            )
    names = {each.name for each in written} | _NOT_TAKEN_OVER
    made = msgspec.defstruct(
        cls.__name__,
        _struct_fields(written, {each.name: each.type for each in written}),
        namespace={name: each for name, each in vars(cls).items() if name not in names},
        module=cls.__module__,
        frozen=True,
    )
    return cast(type[T], made)


def retyped(cls: type[T], **types: object) -> type[T]:
    """Return a subclass of a class made by `value` in which some fields have other types, for a decoder that
    does not know those of `cls`."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # made by `value`
    made = msgspec.defstruct(
        cls.__name__,
        _struct_fields(fields, {each.name: each.type for each in fields} | types),
        bases=(cast(type[msgspec.Struct], cls),),
        module=cls.__module__,
        frozen=True,
    )
    return cast(type[T], made)


def _struct_fields(fields: Iterable[Field[Any]], types: dict[str, Any]) -> _Fields:
    made: _Fields = []
    for each in fields:
        if each.default_factory is not MISSING:
            made.append((each.name, types[each.name], msgspec.field(default_factory=each.default_factory)))
        elif each.default is not MISSING:
            made.append((each.name, types[each.name], each.default))
        else:
            made.append((each.name, types[each.name]))
    return made


if TYPE_CHECKING:

    def contents(one: object) -> tuple[Any, ...]:
        """Return what the fields of a value have, in their order."""
        ...

    def changed(one: T, **new: object) -> T:
        """Return a copy of a value with these fields changed. Raise TypeError for a field that it lacks."""
        ...
else:
    # The functions themselves: they are called several times for each request.
    contents, changed = msgspec.structs.astuple, msgspec.structs.replace
