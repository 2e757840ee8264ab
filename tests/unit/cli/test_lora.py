"""`kvasir lora`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir_platform.cli.main import main

DONE = (200, {"message": "Success", "lora_name": "sql", "workers": ["prefill-1", "decode-1"]})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)


def held(worker_id: str, **changes: Any) -> dict[str, Any]:
    adapter = {"name": "sql", "source": "/adapters/sql", "replicas": 1, "digest": "0123", "rank": 8}
    adapter |= {"nbytes": 3 << 20, "retiring": False, **changes}
    return {"worker_id": worker_id, "model": "llama", "adapters": [adapter]}


def lora(gateway: Any, *arguments: str) -> int:
    return main(["lora", *arguments, "--address", gateway.address])


def test_the_adapters_of_all_workers_are_listed_together(gateway: Any, capsys: Any) -> None:
    workers = [held("decode-1"), held("prefill-1", retiring=True), {"worker_id": "decode-2", "adapters": []}]
    gateway.answers["/status"] = (200, {"workers": workers})
    assert lora(gateway, "list") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "MODEL", "STATE", "RANK", "SIZE", "WORKERS", "COPIES", "SOURCE"]
    assert line.split() == [
        "sql", "llama", "unloading", "8", "3", "MiB", "decode-1,", "prefill-1", "1", "per", "pool",
        "/adapters/sql",
    ]  # fmt: skip
    assert lora(gateway, "list", "-o", "json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["workers"]) == ("sql", ["decode-1", "prefill-1"])


def test_without_adapters_it_says_how_to_load_one(gateway: Any, capsys: Any) -> None:
    gateway.answers["/status"] = (200, {"workers": [{"worker_id": "decode-1"}]})
    assert lora(gateway, "list") == 0
    assert "kvasir lora load NAME SOURCE" in capsys.readouterr().out


def test_loading_and_unloading_send_what_was_asked_and_name_the_workers(gateway: Any, capsys: Any) -> None:
    gateway.answers["/v1/load_lora_adapter"] = gateway.answers["/v1/unload_lora_adapter"] = DONE
    assert lora(gateway, "load", "sql", "/adapters/sql") == 0
    assert lora(gateway, "load", "sql", "org/sql@v2", "--model", "llama", "--replicas", "2") == 0
    assert lora(gateway, "unload", "sql") == 0
    assert gateway.posts == [
        ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/adapters/sql"}),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "sql", "lora_path": "org/sql@v2", "model": "llama", "replicas": 2},
        ),
        ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
    ]
    assert capsys.readouterr().out.splitlines()[::2] == [
        "sql is loaded on prefill-1, decode-1",
        "sql is unloaded from prefill-1, decode-1",
    ]


def test_the_gateways_reason_is_the_error(gateway: Any, capsys: Any) -> None:
    error = {"message": "sql has rank 64, and …", "code": "adapter_rank_too_large"}
    gateway.answers["/v1/load_lora_adapter"] = (400, {"error": error})
    assert lora(gateway, "load", "sql", "/adapters/sql") == 1
    assert capsys.readouterr().err == "error: sql has rank 64, and …\n"
    assert lora(gateway, "load", "sql", "/adapters/sql", "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "adapter_rank_too_large"
