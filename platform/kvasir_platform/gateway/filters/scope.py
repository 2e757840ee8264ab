"""The texts that a filter applies to."""

from __future__ import annotations

from kvasir.config.spec.filters import FilterSpec
from kvasir.ports.output_filter import FilterSubject


class FilterScope:
    """The models, tenants and parts that a spec names."""

    def __init__(self, spec: FilterSpec) -> None:
        self._models = None if spec.models is None else frozenset(spec.models)
        self._tenants = None if spec.tenants is None else frozenset(spec.tenants)
        self._parts = frozenset(spec.parts)

    def has(self, subject: FilterSubject) -> bool:
        """Return whether `subject` is in scope."""
        return (
            subject.part in self._parts
            and (self._models is None or subject.model in self._models)
            and (self._tenants is None or subject.tenant in self._tenants)
        )
