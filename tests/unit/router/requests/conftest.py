"""The request machine with a prefill and a decode worker."""

from __future__ import annotations

import pytest

from kvasir.core.requests import Role

from .test_machine import MakeIdentity, Stage


@pytest.fixture
def stage(make_identity: MakeIdentity) -> Stage:
    made = Stage(make_identity)
    made.ready(p0=Role.PREFILL, d0=Role.DECODE)
    return made
