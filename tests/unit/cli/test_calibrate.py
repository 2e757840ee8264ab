"""`kvasir calibrate` against a gateway that answers as an engine of known speed would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.kit.sim.virtual_batching import VirtualRequest, play

from kvasir.core.identity import Hardware, KvLayout
from kvasir.performance.coefficients import Coefficients
from kvasir.performance.engines import EngineSizes, engine_of_sizes
from kvasir.performance.profile import FORMAT, decode_profile
from kvasir.performance.work import dense_work
from kvasir_platform.cli.main import main

_SIZES = EngineSizes(
    hardware=Hardware("a CPU"),
    kv=KvLayout(32, "float32", "", 4, 4, 32, 32 * 4 * 2 * 4 * 32 * 4),
    parameters=5_000_000,
    model_bytes=20_000_000,
    work=dense_work(parameters=5e6, layers=4, hidden=256, kv_elements=256),
    max_model_len=512,
    max_num_seqs=2,
)
_TRUE = Coefficients(arithmetic=0.15, attention=0.05, step_s=0.004, stream_s=2e-4, request_s=0.006)


def _status(**changes: Any) -> dict[str, Any]:
    worker = {
        "pool": "serve", "role": "BOTH", "model": "m", "state": "ready", "engine": "vllm 0.32.0",
        "hardware": asdict(_SIZES.hardware), "kv_layout": asdict(_SIZES.kv), "max_model_len": 512,
        "model_parameters": _SIZES.parameters, "model_bytes": _SIZES.model_bytes,
        "model_work": None if _SIZES.work is None else asdict(_SIZES.work),
        "batch": {"max_num_batched_tokens": 256, "max_num_seqs": 2}, "load": {"kv_blocks_total": 100},
    }  # fmt: skip
    status = {"deployment": "d", "ready": True, "reason": None, "disaggregation": "never", "models": ["m"]}
    return status | {"workers": [worker]} | changes


class _EngineGateway:
    """Times come from the virtual engine; nothing waits. `status` is what /status says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.status = _status()


@pytest.fixture
def serving() -> Iterator[_EngineGateway]:
    made = engine_of_sizes(_SIZES)
    assert made is not None
    engine = replace(made, coefficients=_TRUE)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps(known.status).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                tokens = [int(word) for word in body["prompt"].split()]
                return self._send(json.dumps({"tokens": tokens, "max_model_len": 512}).encode())
            (found,) = play([VirtualRequest(0.0, len(body["prompt"]), body["max_tokens"])], engine)
            chunk = b'data: {"choices":[{"text":"x"}]}\n\n'
            usage = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
            said = f": server-timing: admit;dur=0.01, ttft;dur={found.ttft_s * 1e3:.3f}\n\n".encode()
            return self._send(chunk * body["max_tokens"] + usage + said + b"data: [DONE]\n\n")

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known = _EngineGateway(f"127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield known
        server.shutdown()
        thread.join()


def test_a_profile_is_written_with_what_was_measured_on_what(
    serving: _EngineGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    assert main(["calibrate", "--quick", "--address", serving.address, "--profile", str(file)]) == 0
    profile = decode_profile(file.read_bytes(), "profile.json")
    (engine,) = profile.engines
    assert (profile.format, profile.model, profile.versions["engine"]) == (FORMAT, "m", "vllm 0.32.0")
    assert (engine.pool, engine.device, engine.max_num_batched_tokens) == ("serve", "a CPU", 256)
    assert {each.kind for each in engine.residuals} >= {"prompts"}
    printed = capsys.readouterr().out
    assert "... " in printed
    assert "MEAN ERROR" in printed
    assert "performance.profile" in printed


def test_the_profile_is_also_printed_as_json(
    serving: _EngineGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    main(["calibrate", "--quick", "--address", serving.address, "--profile", str(file), "-o", "json"])
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_bytes())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ready": False, "reason": "no worker"}, "not ready to serve: no worker"),
        ({"models": ["other"]}, "serves other"),
        ({"workers": []}, "reports the sizes"),
    ],
)
def test_a_deployment_that_cannot_be_measured_is_refused_with_the_reason(
    serving: _EngineGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: str,
) -> None:
    serving.status = _status(**changes)
    arguments = ["calibrate", "--address", serving.address, "--profile", str(tmp_path / "p.json")]
    assert main([*arguments, "--model", "m"]) != 0
    assert words in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_profile_in_no_folder_is_refused_before_anything_is_measured(
    serving: _EngineGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--address", serving.address, "--profile", "/absent/p.json"]) == 2
    assert "/absent is not a folder" in capsys.readouterr().err
