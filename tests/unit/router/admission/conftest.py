"""Requests as admission sees them."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import pytest

from kvasir_router.admission import AdmissionTicket


class MakeTicket(Protocol):
    """A request of `tenant` that costs `cost`; fields of Ticket by name."""

    def __call__(self, tenant: str = "t", cost: int = 1, **fields: Any) -> AdmissionTicket: ...


@pytest.fixture(scope="session")
def make_ticket() -> MakeTicket:
    numbers = itertools.count()

    def make(tenant: str = "t", cost: int = 1, **fields: Any) -> AdmissionTicket:
        number = next(numbers)
        usual: dict[str, Any] = {
            "request_id": f"r{number}",
            "weight": 1.0,
            "level": 0,
            "urgency": float(number),
            "prompt_tokens": cost,
            "kv_least": cost,
            "choices": 1,
            "whole": False,
            "itl_s": 0.1,
            "ttft_s": 2.0,
            "deadline_s": None,
        }
        return AdmissionTicket(tenant=tenant, cost=cost, **(usual | fields))

    return make
