"""The sessions' secret: its sources, and no worker listens beyond loopback without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.config.spec.deployment import WorkerSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.apps import worker_node
from kvasir_platform.apps.common.session_token import session_token


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The tokens that workers were started with; no engine is."""
    tokens: list[str | None] = []

    async def serve(_deployment: object, _pool: str, token: str | None) -> int:
        tokens.append(token)
        return 0

    monkeypatch.setattr(worker_node, "serve", serve)
    return tokens


def start(tmp_path: Path, spec: str, *arguments: str) -> int:
    path = tmp_path / "kvasir.yaml"
    path.write_text(spec)
    return worker_node.main(["--deployment", str(path), "--pool", "decode", *arguments])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "worker-0.kvasir"])
def test_an_open_worker_without_a_token_does_not_start(
    tmp_path: Path, served: list[str | None], capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert start(tmp_path, f"worker: {{host: '{host}'}}") == 2
    assert served == []
    said = capsys.readouterr().err
    assert f"worker.host: {host} is open to the network" in said
    assert "worker.session_token_file" in said


def test_a_worker_on_loopback_needs_no_token(tmp_path: Path, served: list[str | None]) -> None:
    assert start(tmp_path, "") == 0
    assert served == [None]


def test_an_open_worker_takes_the_specs_token_and_the_option_wins(
    tmp_path: Path, served: list[str | None]
) -> None:
    (tmp_path / "spec").write_text("of the spec\n")
    (tmp_path / "option").write_text("of the option\n")
    spec = f"worker: {{host: 0.0.0.0, session_token_file: {tmp_path / 'spec'}}}"
    assert start(tmp_path, spec) == 0
    assert start(tmp_path, spec, "--token-file", str(tmp_path / "option")) == 0
    assert served == ["of the spec", "of the option"]


def test_a_token_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be read"):
        session_token(WorkerSpec(), tmp_path / "absent")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ConfigError, match="empty is empty; write a long random secret"):
        session_token(WorkerSpec(session_token_file=str(tmp_path / "empty")), None)
