"""Connections between the nodes of one engine are signed: who has no key gets none.

The library is loaded into real processes, whose ZeroMQ opens real sockets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvasir.config.spec.deployment import EngineSpec, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role
from kvasir_workers.engines.nodes import leading
from kvasir_workers.engines.signing import signed_tcp
from kvasir_workers.engines.signing.signed_tcp import cannot_sign, make_key, signing_variables
from kvasir_workers.engines.vllm.setup.rendezvous import rendezvous_variables

SOURCE = Path(signed_tcp.__file__).with_name("signed_tcp.c")
PUBLISHER = """
import sys, zmq
queue = zmq.Context().socket(zmq.XPUB)
queue.ipv6 = ":" in sys.argv[1].removeprefix("tcp://")[:-2]
queue.bind(sys.argv[1])
print(queue.last_endpoint.decode(), flush=True)
queue.recv()
queue.send(b"a prompt")
sys.stdin.read()
"""
READER = """
import sys, zmq
queue = zmq.Context().socket(zmq.SUB)
queue.ipv6 = True
queue.subscribe(b"")
queue.connect(sys.argv[1])
print(queue.recv().decode() if queue.poll(int(sys.argv[2])) else "nothing", flush=True)
queue.close(0)
"""
SILENCE_MS = 300


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built from its source."""
    built = tmp_path_factory.mktemp("signing") / "signed_tcp.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(built), str(SOURCE), "-ldl"], check=True
    )
    return built


def environment(library: Path, key: str) -> dict[str, str]:
    return {**os.environ, **signing_variables(key, {}, library)}


@contextmanager
def running(script: str, *arguments: str, env: dict[str, str]) -> Iterator[str]:
    """The first line that a process prints; it lives meanwhile."""
    command = [sys.executable, "-S", "-c", script, *arguments]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def reader(endpoint: str, patience_ms: int, env: dict[str, str]) -> str:
    command = [sys.executable, "-S", "-c", READER, endpoint, str(patience_ms)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def python_path(env: dict[str, str]) -> dict[str, str]:
    """Let Python start without its site packages' hooks, but find them."""
    import zmq

    return {**env, "PYTHONPATH": str(Path(zmq.__file__).parents[1])}


def knocked(port: int) -> None:
    """A stranger connects to a port that drops what it sends."""
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=SILENCE_MS / 1e3)


def test_who_has_the_key_is_served_and_a_stranger_gets_no_connection(library: Path) -> None:
    mine, other = (python_path(environment(library, make_key())) for _ in range(2))
    with running(PUBLISHER, "tcp://127.0.0.1:*", env=mine) as endpoint:
        knocked(int(endpoint.rpartition(":")[2]))
        with ThreadPoolExecutor() as at_once:
            strangers = [
                at_once.submit(reader, endpoint, SILENCE_MS, env)
                for env in (python_path(dict(os.environ)), other)
            ]
        assert [each.result() for each in strangers] == ["nothing", "nothing"]
        assert reader(endpoint, 10_000, mine) == "a prompt"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_a_port_at_every_address_of_both_families_is_signed_for_both(library: Path) -> None:
    mine = python_path(environment(library, make_key()))
    with running(PUBLISHER, "tcp://[::]:*", env=mine) as endpoint:
        port = int(endpoint.rpartition(":")[2])
        knocked(port)
        with pytest.raises(TimeoutError):
            socket.create_connection(("::1", port), timeout=SILENCE_MS / 1e3)
        assert reader(f"tcp://127.0.0.1:{port}", 10_000, mine) == "a prompt"


def test_sockets_of_other_libraries_and_processes_without_a_key_are_left_alone(library: Path) -> None:
    listens = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
input()
"""
    with running(listens, env=environment(library, make_key())) as port:
        socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
    without = python_path({**os.environ, "LD_PRELOAD": str(library)})
    with running(PUBLISHER, "tcp://127.0.0.1:*", env=without) as endpoint:
        assert reader(endpoint, 10_000, python_path(dict(os.environ))) == "a prompt"


def test_the_key_of_an_engine_is_new_at_each_start_and_is_not_shown() -> None:
    first, second = leading("127.0.0.1"), leading("127.0.0.1")
    assert len(first.key) == 64
    assert first.key != second.key
    assert first.key not in repr(first)


def test_signing_keeps_what_was_loaded_before_others(tmp_path: Path) -> None:
    library = tmp_path / "signed.so"
    before = {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}
    found = signing_variables("k", before, library)
    assert found["LD_PRELOAD"] == f"{library}:/usr/lib/libjemalloc.so"
    assert signing_variables("k", found, library) == found
    assert signing_variables("", before, library) == {}


def test_an_installation_without_the_library_is_told_with_what_to_do(tmp_path: Path) -> None:
    problem = cannot_sign(tmp_path / "missing.so")
    assert problem is not None
    assert "C compiler" in problem[0]
    assert "engine.unauthenticated_rendezvous: true" in problem[1]
    assert cannot_sign(Path(__file__)) is None, "this kernel signs"


def wide(**engine: object) -> PoolSpec:
    spec = EngineSpec.model_validate({"tensor_parallel_size": 2, "nodes": 2, **engine})
    return PoolSpec(name="wide", role=Role.BOTH, engine=spec)


def test_nodes_that_cannot_sign_do_not_start_unless_that_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = leading("127.0.0.1")
    monkeypatch.setattr(
        "kvasir_workers.engines.vllm.setup.rendezvous.cannot_sign",
        lambda: ("the kernel signs nothing", "change it"),
    )
    with pytest.raises(ConfigError, match=r"pools\.wide\.engine\.nodes.*the kernel signs nothing: change it"):
        rendezvous_variables(wide(), place, {})
    assert rendezvous_variables(wide(unauthenticated_rendezvous=True), place, {}) == {}
    assert rendezvous_variables(wide(), None, {}) == {}
    monkeypatch.setattr("kvasir_workers.engines.vllm.setup.rendezvous.cannot_sign", lambda: None)
    assert rendezvous_variables(wide(), place, {})["KVASIR_ENGINE_KEY"] == place.key


def test_the_front_of_ranks_on_other_nodes_has_to_be_started_with_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir_workers.engines.vllm.setup.rendezvous.cannot_sign", lambda: None)
    ranks = wide(tensor_parallel_size=1, data_parallel_size=2, kv_events=False)
    with pytest.raises(ConfigError, match="LD_PRELOAD"):
        rendezvous_variables(ranks, leading("127.0.0.1"), {})
