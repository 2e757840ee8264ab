"""Pools on real Ray Serve scale with a load that rises and falls, and no request fails.

Where replicas come and go the engines are simulated and slow, so that a few clients are a load; where one
does another pool's work they are real. Everything else is as a user starts it.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow
StartStack = Callable[..., AbstractContextManager["Stack"]]

ASLEEP = """
disaggregation: never
pools:
  - name: workers
    role: both
    replicas: 1
    cpus: 0.1
    scaling: {min: 0, max: 3}
    engine:
      kind: sim
      max_num_seqs: 4
      sim: {decode_step_s: 0.03}
slo: [{name: default, ttft_s: 1, itl_s: 0.2}]
admission: {patience: 0}
scaling: {interval_s: 2, window_s: 6, idle_s: 8, start_s: 5, stale_s: 6}
worker: {drain_s: 5}
"""
TWO_PARTS = """
disaggregation: always
pools:
  - {name: prefill, role: prefill, replicas: 2, cpus: 0.1, scaling: {min: 1, max: 2}, engine: &small
      {kind: vllm, max_num_seqs: 4, threads: 1, max_num_batched_tokens: 512}}
  - {name: decode, role: decode, replicas: 1, cpus: 0.1, scaling: {min: 1, max: 2}, engine: *small}
slo: [{name: default, ttft_s: 1, itl_s: 0.5}]
admission: {patience: 0}
scaling: {interval_s: 2, window_s: 60, start_s: 40, stale_s: 6}
worker: {drain_s: 5}
"""
TOKENS = 60  # 1.8 s
PATIENCE_S = 240.0


@dataclass(slots=True)
class Clients:
    """Streams one after the other, in so many threads; each must come to its end."""

    url: str
    tokens: int = TOKENS
    model: str = "kvasir-tiny"
    failures: list[str] = field(default_factory=list)
    ended: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def at_work(self, count: int) -> Iterator[None]:
        self._stop.clear()
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(timeout=30)

    def _run(self) -> None:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        while not self._stop.is_set():
            self.one(client)

    def one(self, client: openai.OpenAI | None = None) -> None:
        client = client or openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            chunks = client.completions.create(
                model=self.model,
                prompt="Once upon a time",
                max_tokens=self.tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            finish = None
            for chunk in chunks:
                finish = chunk.choices[0].finish_reason or finish
            if finish != "length":
                self.failures.append(f"finish_reason {finish}")
        except openai.OpenAIError as error:
            self.failures.append(repr(error))
        self.ended += 1


def _serving(stack: Stack) -> int:
    return sum(worker["state"] == "ready" for worker in stack.workers())


def _lent(stack: Stack) -> dict[str, str]:
    """Those that do another pool's work, and which."""
    return {each["worker_id"]: each["assigned"] for each in stack.workers() if each["assigned"]}


def _streams(stack: Stack, worker_id: str) -> int:
    return sum(each["load"]["running"] for each in stack.workers() if each["worker_id"] == worker_id)


def _story(stack: Stack) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(_done(stack.kvasir("-o", "json", "explain", "scaling")).stdout)
    return told


def _done(ran: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert ran.returncode == 0, ran.stderr
    return ran


def test_a_pool_grows_from_one_replica_to_three_and_shrinks_to_one_without_a_failed_request(
    models: Stack,
) -> None:
    def members() -> list[dict[str, Any]]:
        return [worker for worker in models.workers() if worker["pool"] == "second"]

    def serving() -> int:
        return sum(worker["state"] == "ready" for worker in members())

    clients = Clients(models.url, model="second")
    with clients.at_work(11):
        models.wait_until(lambda: serving() == 3, PATIENCE_S, "three workers")
        first = {worker["worker_id"] for worker in members()}
    assert models.metric("kvasir_pool_replicas_desired", pool="second") == 3
    with clients.at_work(1):
        models.wait_until(lambda: len(members()) == 1, PATIENCE_S, "one worker again")
    assert clients.failures == []
    assert clients.ended > 11
    # Those that were chosen went, and nobody came in their place.
    assert {worker["worker_id"] for worker in members()} <= first
    acts = _story(models)["acts"]
    assert {act["what"] for act in acts if act["done"]} == {"start", "retire"}
    assert {act["pool"] for act in acts} == {"second"}
    said = _done(models.kvasir("explain", "scaling")).stdout
    assert "predicted within" in said
    assert "the planner sizes the pools" in said

    _done(models.kvasir("scale", "second=2"))
    models.wait_until(lambda: serving() == 2, PATIENCE_S, "the pinned two")
    assert "pinned to 2" in _done(models.kvasir("explain", "scaling")).stdout
    refused = models.kvasir("scale", "second=4")
    assert refused.returncode == 2
    assert "scaling.max" in refused.stderr
    _done(models.kvasir("scale", "second=auto"))
    models.wait_until(lambda: len(members()) == 1, PATIENCE_S, "one worker, unpinned")


@pytest.mark.soak
def test_a_model_that_nobody_asks_for_sleeps_and_its_next_request_waits_for_a_start(
    start_stack: StartStack, tmp_path: Path
) -> None:
    path = tmp_path / "asleep.yaml"
    path.write_text(ASLEEP)
    with start_stack(tmp_path, "-f", str(path)) as stack:
        clients = Clients(stack.url)
        for _ in range(2):
            clients.one()
            stack.wait_until(lambda: stack.workers() == [], PATIENCE_S, "no worker")
            assert stack.page("/health/ready").status_code == 200
        clients.one()
        assert clients.failures == []
        assert [act["what"] for act in _story(stack)["acts"]].count("wake") == 2


@pytest.mark.soak
def test_a_worker_that_its_pool_can_spare_does_the_other_pools_work_and_none_is_started(
    start_stack: StartStack, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "two.yaml"
    path.write_text(TWO_PARTS)
    with start_stack(tmp_path, "-f", str(path)) as stack:
        # The stack is ready with one of each pool.
        stack.wait_until(lambda: _serving(stack) == 3, PATIENCE_S, "all workers")
        began = {worker["worker_id"] for worker in stack.workers()}
        clients = Clients(stack.url, tokens=300)
        with clients.at_work(7):
            stack.wait_until(lambda: bool(_lent(stack)), PATIENCE_S, "a worker that is lent")
            (lent,) = _lent(stack)
            stack.wait_until(lambda: _streams(stack, lent) >= 2, PATIENCE_S, "streams on it")
            assert "does decode work" in _done(stack.kvasir("status")).stdout
        assert clients.failures == []
        assert {worker["worker_id"] for worker in stack.workers()} == began
        acts = [(act["pool"], act["what"], act["count"]) for act in _story(stack)["acts"]]
        assert acts == [("decode", "flip", 1)]
