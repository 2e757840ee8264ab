"""Settings with which a release cannot be taken out of its cluster."""

from __future__ import annotations

import pytest

from kvasir_platform.apps.uninstall import main

GIVEN = ["--cluster", "llm", "--credentials", "/absent"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_wait_that_never_ends_or_is_none_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*GIVEN, "--timeout-s", seconds])
    assert f"--timeout-s: {seconds} is not a number of seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--redis-url=http://redis:6379"], "redis://host:port/db"),
        (["--redis-url=redis://redis:6379", "--redis-ca-file=ca.crt"], "the url does not use TLS"),
        ([], "works inside a cluster only"),
    ],
)
def test_what_cannot_be_used_is_named(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main([*GIVEN, *options]) == 1
    assert message in capsys.readouterr().err
