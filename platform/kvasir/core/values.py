"""Frozen values with minimal cost: some are created for every token of every stream.

`dataclass(frozen=True)` assigns each field through a guarded call, which for a Delta takes longer than all
other work of the router on it. Here, only the type checker rejects assignments, at no cost at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass with slots that compares and hashes by its fields. Types treat it as frozen."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
