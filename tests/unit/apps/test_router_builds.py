"""A router says what of it was not built when it starts."""

from __future__ import annotations

import pytest

from kvasir import native
from kvasir_platform.apps import router_app


def test_a_router_that_runs_as_python_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "IS_NATIVE", False)
    monkeypatch.setattr(router_app, "is_compiled", lambda: False)
    router_app.warn_of_builds()
    assert ["native extension" in line for line in caplog.messages] == [True, False]
    assert "the router is not compiled" in caplog.messages[1]


def test_a_router_that_was_built_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "IS_NATIVE", True)
    monkeypatch.setattr(router_app, "is_compiled", lambda: True)
    router_app.warn_of_builds()
    assert caplog.messages == []
