"""Overhead of the whole stack over the engine alone, and time to the first token after a start.

Starts the product with `make up`, as a user does, measures it, and stops it. The engine alone is vLLM's
asynchronous engine with the decode pool's arguments, in its own process on the same machine; both are
measured in turn, so that drift of the machine affects both.

    make bench-foundation              on a warm install
    make bench-foundation ARGS=--bare  also from a fresh copy of the tree without an environment
    make bench-foundation ARGS="--only cancel"    these rows; the others stay as the report has them
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvasir import native
from load_tests.client import stream_completion
from load_tests.report import REPORTS, Row, median, merged, read, write

ROOT = Path(__file__).resolve().parents[2]
MODEL = "kvasir-tiny"
LONGEST_S = 30.0
MAKE_UP = ("make", "--no-print-directory", "up", "ARGS=--port 0 -o json")
WORDS = ("and", "the", "of", "that", "in", "he", "shall", "unto", "for", "his", "a", "lord", "they", "thou")


@dataclass(slots=True)
class Stack:
    """A running `make up`."""

    process: subprocess.Popen[str]
    address: str
    home: Path
    first_token_s: float

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [child for child in [root, *root.children(recursive=True)] if _name(child) != "make"]


@contextlib.contextmanager
def running_stack(root: Path, command: Sequence[str] = MAKE_UP) -> Iterator[Stack]:
    """The stack that `command` starts in `root`, from its first streamed token; stopped on exit."""
    home = Path(tempfile.mkdtemp(prefix="kvasir-bench-"))
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVASIR_HOME": str(home), "PIP_NO_CACHE_DIR": "1"},
        process_group=0,
    )
    try:
        address = _await_ready(process)
        asyncio.run(stream_completion(address, MODEL, "In the beginning", 4))
        yield Stack(process, address, home, time.monotonic() - began)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
        shutil.rmtree(home, ignore_errors=True)


def _await_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        with contextlib.suppress(ValueError, AttributeError):
            event = json.loads(line)
            print(f"  {event.get('event')} {event.get('step', '')} {event.get('text', '')}", flush=True)
            if event.get("event") == "ready":
                return str(event["text"])
    raise RuntimeError("make up exited before it was ready:\n" + "".join(seen[-40:]))


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        line = " ".join(process.cmdline()) or process.name()
        for mark, name in (
            ("router_app", "router"),
            ("control_app", "control"),
            ("ServeReplica", "replica"),
            ("ServeController", "serve controller"),
            ("EngineCore", "engine core"),
            ("gcs_server", "ray gcs"),
            ("raylet/raylet", "raylet"),
            ("ray::", "ray agent"),
            ("/ray/", "ray agent"),
            ("ray.", "ray agent"),
            ("cli", "supervisor"),
            ("kvasir", "supervisor"),
            ("resource_tracker", "resource tracker"),
            ("spawn_main", "engine core"),
        ):
            if mark in line:
                return name
        return process.name()
    return "gone"


def _cpu(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def idle_and_memory(stack: Stack, seconds: float) -> list[Row]:
    """CPU of the idle stack in cores, and proportional memory (PSS) by kind of process."""
    processes = stack.processes()
    before, began = _cpu(processes), time.monotonic()
    time.sleep(seconds)
    cores = (_cpu(processes) - before) / (time.monotonic() - began)
    rows = [Row("idle cpu", cores, "cores", "lower", target=0.2, note=f"over {seconds:.0f} s")]
    memory: dict[str, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            name = _name(process)
            memory[name] = memory.get(name, 0.0) + process.memory_full_info().pss / 2**20
    rows += [
        Row(f"memory {name}", mib, "MiB", "lower")
        for name, mib in sorted(memory.items(), key=lambda m: -m[1])
    ]
    rows.append(Row("memory in all", sum(memory.values()), "MiB", "lower", note="proportional set size"))
    return rows


def _prompt(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def ttft(address: str, rounds: int) -> list[Row]:
    """TTFT of a long prompt, cold and repeated."""
    rng = random.Random(1)
    cold, warm = [], []
    tokens = 0
    for _ in range(rounds):
        prompt = _prompt(rng, 1200)
        first = await stream_completion(address, MODEL, prompt, 2)
        again = await stream_completion(address, MODEL, prompt, 2)
        cold.append(first.ttft_s * 1e3)
        warm.append(again.ttft_s * 1e3)
        tokens = first.prompt_tokens or 0
    (cold_ms, cold_spread), (warm_ms, warm_spread) = median(cold), median(warm)
    return [
        Row("ttft cold", cold_ms, "ms", "lower", spread=cold_spread, note=f"{tokens} tokens of prompt"),
        Row(
            "ttft prefix hit",
            warm_ms,
            "ms",
            "lower",
            peer=cold_ms,
            ratio=warm_ms / cold_ms,
            target_ratio=1.0,
            spread=warm_spread,
            note="the same prompt again; ratio to cold",
        ),
    ]


async def stack_rate(address: str, streams: int, tokens: int, seed: int) -> float:
    """Output tokens per second of `streams` concurrent completions over HTTP."""
    rng = random.Random(seed)
    prompts = [_prompt(rng, 40) for _ in range(streams)]
    began = time.perf_counter()
    results = await asyncio.gather(*(stream_completion(address, MODEL, prompt, tokens) for prompt in prompts))
    elapsed = time.perf_counter() - began
    return sum(result.output_tokens or 0 for result in results) / elapsed


def cancel(address: str, rounds: int) -> Row:
    """Time from the client's disconnect until the engine has stopped, according to the workers' load."""
    took = []
    for round_ in range(rounds):
        wanted = {"model": MODEL, "prompt": f"{round_} and", "max_tokens": 3000, "ignore_eos": True}
        with _sent(address, wanted | {"stream": True}) as client:
            while b"data: " not in client.recv(65536):
                pass
            if _idle(address):
                raise RuntimeError("the request does not run, so its end cannot be measured")
            began = time.perf_counter()
        _await(lambda: _idle(address), "the engine did not stop")
        took.append((time.perf_counter() - began) * 1e3)
    value, spread = median(took)
    return Row(
        "cancel until the engine stopped",
        value,
        "ms",
        "lower",
        target=200.0,
        spread=spread,
        note=f"{rounds} hang-ups, seen through /status",
    )


def cancel_at_hand_off(address: str, rounds: int) -> Row:
    """Time from the client's disconnect before its first token until neither engine holds KV for it."""
    rng = random.Random(5)
    took = []
    for round_ in range(rounds):
        with _sent(address, {"model": MODEL, "prompt": _prompt(rng, 2000), "max_tokens": 200}):
            _await(lambda: not _free(address), "the request did not begin")
            time.sleep(0.05 * round_)  # from the middle of the prefill to decoding
            began = time.perf_counter()
        _await(lambda: _free(address), "an engine still holds KV")
        took.append((time.perf_counter() - began) * 1e3)
    _, spread = median(took)
    return Row(
        "cancel around the hand-off until both engines' KV is free, the longest",
        max(took),
        "ms",
        "lower",
        target=1000.0,
        spread=spread,
        note=f"{rounds} hang-ups, each 50 ms later than the last, by the engines' own KV usage and leases",
    )


@contextlib.contextmanager
def _sent(address: str, wanted: dict[str, object]) -> Iterator[socket.socket]:
    """A completion that runs until the client disconnects at the end of the context."""
    host, _, port = address.rpartition(":")
    body = json.dumps(wanted).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield client


def _await(true: Callable[[], bool], failure: str) -> None:
    """Poll until the condition is true. Raise RuntimeError after the longest time that anything here may
    take."""
    until = time.perf_counter() + LONGEST_S
    while not true():
        if time.perf_counter() > until:
            raise RuntimeError(f"{failure} within {LONGEST_S:g} s")


def _workers(address: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{address}/status", timeout=5) as answer:
        workers: list[dict[str, Any]] = json.load(answer)["workers"]
    return workers


def _idle(address: str) -> bool:
    return not any(worker["in_flight"] or worker["load"]["running"] for worker in _workers(address))


def _free(address: str) -> bool:
    held = ("running", "waiting", "kv_usage", "kv_blocks_leased")
    return not any(
        worker["in_flight"] or any(worker["load"][one] for one in held) for worker in _workers(address)
    )


class EngineAlone:
    """vLLM alone in a child process that prints one JSON line per measurement."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "load_tests.engine_alone"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def rate(self, streams: int, tokens: int, seed: int) -> float:
        rng = random.Random(seed)
        prompts = [_prompt(rng, 40) for _ in range(streams)]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return float(self._read()["rate"])

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"alone"'):
                # vLLM's core has the same output, and may write before the end of the line.
                found: dict[str, float] = json.JSONDecoder().raw_decode(line)[0]["alone"]
                return found
        raise RuntimeError("the engine alone ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def throughput(address: str, rounds: int) -> list[Row]:
    """Tokens per second through the stack and of the engine alone, measured in turn."""
    rows = []
    alone = EngineAlone()
    try:
        for streams, tokens, target in ((1, 256, 0.9), (16, 128, 0.75)):
            ours, theirs, ratios = [], [], []
            for round_ in range(rounds + 1):
                a = asyncio.run(stack_rate(address, streams, tokens, seed=round_))
                b = alone.rate(streams, tokens, seed=round_)
                if round_ == 0:
                    continue  # warm-up
                ours.append(a)
                theirs.append(b)
                ratios.append(a / b)
            rate, spread = median(ours)
            name = "1 stream" if streams == 1 else f"{streams} streams"
            rows.append(
                Row(
                    f"tokens/s {name}",
                    rate,
                    "tok/s",
                    "higher",
                    peer=median(theirs)[0],
                    ratio=median(ratios)[0],
                    target_ratio=target,
                    spread=spread,
                    note=f"peer: vLLM alone, aggregated; ratios of {rounds} pairs: "
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                )
            )
    finally:
        alone.close()
    return rows


def cancels(address: str, rounds: int) -> list[Row]:
    """Times from the client's disconnect until engines have stopped."""
    return [cancel(address, rounds), cancel_at_hand_off(address, 2 * rounds)]


_PARTS: dict[str, Callable[[str, int], list[Row]]] = {
    "ttft": lambda address, rounds: asyncio.run(ttft(address, rounds)),
    "cancel": cancels,
    "throughput": throughput,
}


def bare_start() -> Row:
    """`make up` in a copy of the tracked tree without an environment, until the first token."""
    with tempfile.TemporaryDirectory(prefix="kvasir-bare-") as folder:
        copy = Path(folder) / "kvasir"
        subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(copy)], check=True)
        with running_stack(copy) as stack:
            return Row(
                "first token, bare",
                stack.first_token_s,
                "s",
                "lower",
                note="fresh clone, environment made and installed from the package index",
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bare", action="store_true", help="also measure the start from a fresh clone")
    parser.add_argument("--only", choices=tuple(_PARTS), help="measure these rows, and keep the others")
    parser.add_argument("--rounds", type=int, default=5, help="pairs per comparison")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    args = parser.parse_args()
    if not native.IS_NATIVE:
        sys.exit(
            "the native extension is not built, and figures without it are not the product's: apt install g++"
        )
    rows: list[Row] = []
    if args.bare:
        rows.append(bare_start())
    with running_stack(ROOT) as stack:
        if args.only is None:
            rows.append(Row("first token, warm", stack.first_token_s, "s", "lower", target=60.0))
        for part in _PARTS if args.only is None else (args.only,):
            rows += _PARTS[part](stack.address, args.rounds)
        if args.only is None:
            rows += idle_and_memory(stack, args.idle_seconds)
        else:
            rows = merged(read(REPORTS / "foundation.json"), rows)
    path = write("foundation", "make bench-foundation" + (" ARGS=--bare" if args.bare else ""), rows)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
