"""Frozen values that cost as little as they can: some are made for every token of every stream.

`dataclass(frozen=True)` assigns each field through a guarded call, which for one Delta takes longer than all
else that the router does with it. Nothing assigns to a value after it is made; that is for the type checker
to see to, and it does, at no cost at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A dataclass with slots whose values compare and hash by their fields, frozen as types have it."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
