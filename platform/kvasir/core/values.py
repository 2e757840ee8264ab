"""Frozen values with minimal cost: some are created for every token of every stream.

`dataclass(frozen=True)` assigns each field through a guarded call, which for a Delta takes longer than all
other work of the router on it. Here, only the type checker rejects assignments, at no cost at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass with slots that compares and hashes by its fields. Types treat it as frozen."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


def changed(one: T, **new: object) -> T:
    """Return a copy of a value with these fields changed, as `dataclasses.replace` does in up to three times
    the time (by hand). Of a class made by `value` with two fields or more. Raises AttributeError for a field
    that it has not."""
    made: T = type(one)(*_READERS[type(one)](one))
    for name, content in new.items():
        setattr(made, name, content)
    return made


class _Readers(dict[type[Any], Callable[[Any], tuple[Any, ...]]]):
    """What reads all fields of a value, in their order, by its class; made at the first use of a class."""

    def __missing__(self, cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
        made = self[cls] = attrgetter(*[each.name for each in fields(cls)])
        return made


_READERS = _Readers()
