"""Which tenants' data stays in which cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvasir.core.errors import RequestError


class Residency:
    """The cells where requests of tenants may run, by tenant; other tenants may run anywhere."""

    def __init__(self, cells: Mapping[str, Sequence[str]]) -> None:
        self._cells = {tenant: frozenset(allowed) for tenant, allowed in cells.items()}

    def of(self, tenant: str) -> frozenset[str] | None:
        """Return the cells where the tenant's requests may run, None for all."""
        return self._cells.get(tenant)

    def check(self, tenant: str, cell: str) -> None:
        """Raise RequestError 403 if requests of the tenant may not be in `cell`."""
        allowed = self._cells.get(tenant)
        if allowed is not None and cell not in allowed:
            raise RequestError(
                f"Data of tenant {tenant} stays in {', '.join(sorted(allowed))}, and this is {cell}: send "
                "the request to a gateway there.",
                status=403,
                code="data_residency",
            )
