"""A router says what of it was not built when it starts."""

from __future__ import annotations

import pytest

from kvasir import native
from kvasir_platform.apps import router_app


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_router_warns_of_exactly_what_was_not_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_native: bool, compiled: bool
) -> None:
    monkeypatch.setattr(native, "IS_NATIVE", is_native)
    monkeypatch.setattr(router_app, "is_compiled", lambda: compiled)
    router_app.warn_of_builds()
    told = [name for name in ("native extension", "router is not compiled") for line in caplog.messages
            if name in line]  # fmt: skip
    lacking = {"native extension": not is_native, "router is not compiled": not compiled}
    assert told == [name for name, lacks in lacking.items() if lacks]
    assert len(caplog.messages) == len(told)
