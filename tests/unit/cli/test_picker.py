"""`kvasir picker`: what it is given, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvasir_platform.apps import picker_app
from kvasir_platform.apps.picker_app import PickerOptions
from kvasir_platform.cli.main import main
from kvasir_platform.picker.endpoints import PickerLimits


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[PickerOptions]:
    """The options that the process is run with."""
    seen: list[PickerOptions] = []

    def run(options: PickerOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(picker_app, "run", run)
    return seen


def test_by_default_it_is_reached_from_this_machine_only(given: list[PickerOptions]) -> None:
    assert main(["picker", "--endpoint", "10.0.0.7:8000", "--endpoint", "[fd00::1]:8000"]) == 0
    assert given == [PickerOptions(endpoints=("10.0.0.7:8000", "[fd00::1]:8000"))]


def test_options_reach_the_process(given: list[PickerOptions]) -> None:
    words = "--pool llama --namespace prod --host 0.0.0.0 --port 0 --max-requests 8 --kv-tokens 1024"
    more = "--predicted-ttl 9 --policy llm_d --tls-cert c --tls-key k --conformance"
    assert main(["picker", *words.split(), *more.split()]) == 0
    limits = PickerLimits(max_requests=8, kv_tokens=1024, predicted_ttl_s=9.0, policy="llm_d")
    assert given == [
        PickerOptions(
            host="0.0.0.0", port=0, pool="llama", namespace="prod", tls_cert=Path("c"), tls_key=Path("k"),
            test_headers=True, limits=limits,
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "10.0.0.7"], "write IP:PORT, as in 10.0.0.7:8000"),
        (["--endpoint", "10.0.0.7:0"], "write IP:PORT"),
        (["--endpoint", "vllm:8000"], "write IP:PORT"),
        (["--pool", "llama", "--tls-cert", "c"], "--tls-cert and --tls-key belong together"),
        (["--endpoint", "10.0.0.7:8000", "--policy", "best"], "routing policy 'best' is none of cost"),
        (["--endpoint", "10.0.0.7:8000", "--tls-cert", "/none", "--tls-key", "/none"], "cannot be read"),
        (["--pool", "llama"], "inside a cluster only"),
    ],
)
def test_what_cannot_work_is_refused_before_it_serves(
    arguments: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["picker", "--port", "0", *arguments]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--port", "99999", "from 0 to 65535"), ("--max-requests", "few", "a whole number from 1 to")],
)
def test_numbers_have_bounds(option: str, value: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["picker", "--endpoint", "10.0.0.7:8000", option, value])
    assert message in capsys.readouterr().err
