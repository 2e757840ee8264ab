"""Each fault makes a sentence that says what is wrong and what to do, the most severe first."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.core.kv import KvState, KvStatus, Medium, TierLoad
from kvasir.core.requests import EngineLoad, SloClass, Usage
from kvasir.ports.router import (
    AdmissionView,
    BrownoutView,
    EndedRequests,
    HealthView,
    RequestSummary,
    WorkerView,
)
from kvasir.ports.routing import CROSS_ROLE
from kvasir_platform.gateway.openai.schema.operation import PoolSize
from kvasir_platform.gateway.operator.verdict import StatusFacts, problems_of, verdict_of

DAY_S = 86_400.0
GOOD = WorkerView("decode-1", "10.0.0.1:1", "decode", "ready", load=EngineLoad(running=2, kv_usage=0.5))
QUEUE = AdmissionView(kv_tokens=1000, reserved_tokens=100)
WELL = StatusFacts(
    now=100.0,
    readiness={"llama": None},
    workers=(GOOD, replace(GOOD, worker_id="decode-2")),
    pools=(PoolSize("decode", "llama", "both", desired=2, serving=2, starting=0),),
    queues={"llama": QUEUE},
    in_flight=3,
)


def with_worker(worker: WorkerView) -> StatusFacts:
    return replace(WELL, workers=(worker, replace(GOOD, worker_id="decode-2")))


def with_queue(queue: AdmissionView) -> StatusFacts:
    return replace(WELL, queues={"llama": queue})


def with_pool(desired: int, serving: int, starting: int) -> StatusFacts:
    return replace(WELL, pools=(PoolSize("decode", "llama", "both", desired, serving, starting),))


ENDED = RequestSummary(
    "r",
    "llama",
    "ok",
    arrival_s=90.0,
    routed_s=90.0,
    prefill_done_s=90.5,
    first_token_s=90.6,
    finished_s=91.0,
    prefill_worker="prefill-1",
    decode_worker="decode-1",
    usage=Usage(prompt_tokens=100, cached_tokens=80, output_tokens=9),
    slo=SloClass("chat", 1.0, 0.1),
)
ELSEWHERE = replace(ENDED, prefill_worker="prefill-2", decode_worker="decode-2")
BEFORE = replace(ENDED, arrival_s=10.0, finished_s=11.0)


def with_ended(*ended: RequestSummary) -> StatusFacts:
    return replace(WELL, ended=[EndedRequests.of(ended)])


def late(summary: RequestSummary, seconds: float, **more: float) -> RequestSummary:
    """The request, with so much more time before its first token."""
    moved = replace(summary, first_token_s=90.6 + seconds, finished_s=91.0 + seconds)
    return replace(moved, **more)  # type: ignore[arg-type]


def test_without_a_fault_all_is_well() -> None:
    found = verdict_of(WELL)
    assert found.ok
    assert found.problems == []
    assert found.sentence == "All is well: 2 workers serve 1 model, 3 requests running."


REDIS = TierLoad(Medium.REMOTE, trouble="Redis does not answer; check tiers.remote", readable=False)
ON_THIS_MACHINE = {
    ("down", "crashed"),
    ("down", "starting"),
    ("down", "no_answer"),
    ("degraded", "replica_failed"),
    ("warning", "planner_frozen"),
}
"""What `kvasir status` adds (tests/unit/cli/test_status.py)."""
FULL_DISK = TierLoad(Medium.DISK, trouble="the disk is full; free some space")
FAULTS = [
    (
        with_worker(replace(GOOD, health=HealthView("probing"))),
        "warning",
        "worker_probing",
        "worker decode-1 is tried out after a failure",
    ),
    (replace(WELL, stopping=True), "down", "stopping", "the router is stopping"),
    (
        replace(WELL, readiness={"llama": "pool decode has no ready worker"}),
        "down",
        "not_ready",
        "llama is not served: pool decode has no ready worker",
    ),
    (
        with_queue(replace(QUEUE, parked=4)),
        "down",
        "no_workers",
        "4 requests for llama wait, and no worker can take them",
    ),
    (
        with_queue(replace(QUEUE, brownout=BrownoutView(1, "1; shed=2"))),
        "degraded",
        "brownout",
        "llama is in brown-out (1; shed=2)",
    ),
    (
        with_queue(replace(QUEUE, queued=9, wait_s=3.0, pressure=1.5)),
        "degraded",
        "queue_wait",
        "a typical request to llama waits 3.0 s, 150% of its promised time to first token (9 wait)",
    ),
    (
        with_queue(replace(QUEUE, queued=1, wait_s=0.6, pressure=0.3)),
        "warning",
        "queue_wait",
        "waits 0.6 s, 30%",
    ),
    (
        with_queue(replace(QUEUE, queued=2, reserved_tokens=980)),
        "degraded",
        "kv_full",
        "KV memory for llama is full, and 2 requests wait for it",
    ),
    (
        with_worker(replace(GOOD, state="refused", reason="kv dtype fp8, expected bf16")),
        "degraded",
        "worker_refused",
        "worker decode-1 is refused (kv dtype fp8, expected bf16)",
    ),
    (
        with_worker(replace(GOOD, state="interrupted", reason="connection reset")),
        "degraded",
        "worker_interrupted",
        "worker decode-1 has lost its connection (connection reset)",
    ),
    (
        with_worker(replace(GOOD, state="connecting")),
        "warning",
        "worker_connecting",
        "worker decode-1 is not connected",
    ),
    (
        with_worker(replace(GOOD, state="draining", reason="kernel update")),
        "warning",
        "worker_draining",
        "worker decode-1 drains (kernel update)",
    ),
    (
        with_worker(replace(GOOD, health=HealthView("ejected", "5 failures in a row"))),
        "degraded",
        "worker_ejected",
        "worker decode-1 is ejected (5 failures in a row)",
    ),
    (
        with_worker(replace(GOOD, health=HealthView("unresponsive"))),
        "degraded",
        "worker_unresponsive",
        "worker decode-1 does not respond",
    ),
    (
        with_worker(replace(GOOD, health=HealthView(panic=True))),
        "degraded",
        "panic",
        "too many workers of pool decode",
    ),
    (with_pool(3, 2, 0), "warning", "pool_short", "2 of 3 replicas of pool decode serve"),
    (
        replace(with_pool(3, 0, 1), workers=()),
        "degraded",
        "pool_short",
        "0 of 3 replicas of pool decode serve, 1 of the others",
    ),
    (with_pool(3, 2, 1), "warning", "pool_short", "2 of 3 replicas of pool decode serve, 1 of the others"),
    (
        with_worker(replace(GOOD, load=EngineLoad(waiting=7, kv_usage=0.99))),
        "degraded",
        "worker_kv_full",
        "KV memory of decode-1 is full (99%), and 7 requests wait in its engine",
    ),
    (
        with_worker(replace(GOOD, kv=KvStatus(KvState.CATCHING_UP, "a batch is missing", since_s=60.0))),
        "warning",
        "stale_index",
        "the index does not know what decode-1 has cached (a batch is missing)",
    ),
    (
        with_worker(replace(GOOD, kv=KvStatus(KvState.PREDICTED, "its log is malformed", since_s=99.0))),
        "warning",
        "stale_index",
        "(its log is malformed)",
    ),
    (
        with_worker(replace(GOOD, load=EngineLoad(tiers=(REDIS,)))),
        "degraded",
        "tier",
        "the remote tier of worker decode-1 cannot be read: Redis does not answer",
    ),
    (
        with_worker(replace(GOOD, load=EngineLoad(tiers=(FULL_DISK,)))),
        "warning",
        "tier",
        "the disk tier of worker decode-1",
    ),
    (
        replace(with_queue(replace(QUEUE, queued=20)), tenants={"acme": 45, "lab": 5}),
        "warning",
        "greedy_tenant",
        "tenant acme has 90% of the 50 requests that run or wait",
    ),
    (
        with_ended(*[replace(ENDED, outcome="worker_lost")] * 5, *[ENDED] * 15),
        "degraded",
        "failing_requests",
        "5 of the last 20 requests to llama failed, most of them with worker_lost",
    ),
    (
        with_ended(*[replace(ENDED, outcome="worker_lost")] * 900, *[ENDED] * 400, *[late(ENDED, 2.0)] * 100),
        "degraded",
        "slow_first_tokens",
        "100 of the last 500 requests to llama missed their promised time to first token",
    ),
    (
        with_ended(*[late(ENDED, 2.0, prefill_done_s=92.5), late(ELSEWHERE, 2.0, prefill_done_s=92.5)] * 5),
        "degraded",
        "slow_first_tokens",
        "requests to llama missed their promised time to first token; most of it was computing prompts",
    ),
    (
        with_ended(*[late(ENDED, 2.0, prefill_done_s=92.5)] * 4, *[ELSEWHERE] * 8),
        "degraded",
        "slow_first_tokens",
        "computing prompts, mostly on worker prefill-1",
    ),
    (
        with_ended(*[late(ENDED, 2.0, pulled_s=2.0)] * 4, *[late(ELSEWHERE, 2.0, pulled_s=2.0)] * 6),
        "degraded",
        "slow_first_tokens",
        "most of it was transferring KV",
    ),
    (
        with_ended(*[replace(ENDED, finished_s=95.0), replace(ELSEWHERE, finished_s=95.0)] * 6),
        "degraded",
        "slow_tokens",
        "missed their promised time between tokens; most of it was steps of engines",
    ),
    (
        with_ended(*[BEFORE] * 20, *[replace(ENDED, usage=Usage(prompt_tokens=100, cached_tokens=5))] * 10),
        "warning",
        "cold_cache",
        "the prefix caches of llama are cold: 5% of prompt tokens were cached in the last minute, 80% before",
    ),
    (
        with_ended(*[replace(ENDED, reason=CROSS_ROLE)] * 6, *[ENDED] * 6),
        "degraded",
        "role_lost",
        "6 of the last 12 requests to llama ran whole on one worker",
    ),
    (replace(WELL, limits_shared=False), "degraded", "limits_not_shared", "Redis does not answer"),
    (replace(WELL, planner_inactive_s=31.0), "warning", "planner_inactive", "not answered for 31 s"),
    (replace(WELL, discovery_stale_s=90.0), "warning", "discovery_stale", "not been looked up for 90 s"),
    (
        replace(WELL, certificates={"/tls/tls.crt": -5.0}),
        "down",
        "certificate_expired",
        "the certificate /tls/tls.crt has expired",
    ),
    (replace(WELL, certificates={"c.pem": DAY_S / 2}), "degraded", "certificate_expires", "in 12 hours"),
    (replace(WELL, certificates={"c.pem": 10 * DAY_S}), "warning", "certificate_expires", "in 10 days"),
]


@pytest.mark.parametrize(("facts", "severity", "code", "text"), FAULTS, ids=[each[2] for each in FAULTS])
def test_a_fault_is_said_with_what_to_do(facts: StatusFacts, severity: str, code: str, text: str) -> None:
    found = verdict_of(facts)
    (problem,) = found.problems
    assert not found.ok
    assert (problem.severity, problem.code) == (severity, code)
    assert text in problem.text
    assert problem.remedy
    assert found.sentence.startswith(
        {
            "down": "Requests fail: ",
            "degraded": "Service is degraded: ",
            "warning": "Requests are served, but ",
        }[severity]
    )
    assert problem.text in found.sentence
    assert problem.remedy[1:] in found.sentence


def test_the_page_for_operators_lists_each_problem_by_severity() -> None:
    page = (Path(__file__).parents[4] / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(down|degraded|warning)` \|[^|]*\|(.*)\|$", page, re.MULTILINE)
    listed = {(severity, code) for severity, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert listed == {(severity, code) for _, severity, code, _ in FAULTS} | ON_THIS_MACHINE


def test_what_is_configured_or_passes_by_itself_is_no_problem() -> None:
    fine = [
        with_worker(
            replace(GOOD, kv=KvStatus(KvState.PREDICTED, "its pool is routed to by prediction", since_s=0.0))
        ),
        with_worker(replace(GOOD, kv=KvStatus(KvState.CATCHING_UP, "new", since_s=95.0))),
        with_worker(replace(GOOD, health=HealthView("slow_start", share=0.5))),
        with_worker(replace(GOOD, load=EngineLoad(kv_usage=1.0))),
        with_queue(replace(QUEUE, queued=1, pressure=0.1)),
        with_pool(0, 0, 0),
        with_ended(*[replace(ENDED, outcome="worker_lost")] * 5),
        with_ended(*[replace(ENDED, outcome="client_closed")] * 50),
        with_ended(*[late(ENDED, 2.0)], *[ENDED] * 19),
        with_ended(*[replace(BEFORE, outcome="worker_lost")] * 50),
        with_ended(*[BEFORE] * 20, *[replace(ENDED, usage=Usage(prompt_tokens=100, cached_tokens=50))] * 10),
        replace(WELL, tenants={"acme": 50, "lab": 0}),
        replace(with_queue(replace(QUEUE, queued=20)), tenants={"acme": 50}),
        replace(WELL, certificates={"c.pem": 90 * DAY_S}, limits_shared=True, discovery_stale_s=5.0),
    ]
    assert [problems_of(facts) for facts in fine] == [[]] * len(fine)


def test_a_worker_that_drains_is_not_missing_from_its_pool_too() -> None:
    drains = replace(with_worker(replace(GOOD, state="draining")), pools=with_pool(2, 1, 0).pools)
    assert [each.code for each in problems_of(drains)] == ["worker_draining"]


def test_the_most_severe_problem_is_named_and_the_others_are_counted() -> None:
    facts = replace(
        with_worker(replace(GOOD, state="draining", reason="update")),
        readiness={"llama": "no worker"},
        limits_shared=False,
    )
    found = verdict_of(facts)
    assert [each.severity for each in found.problems] == ["down", "degraded", "warning"]
    assert found.sentence.startswith("Requests fail: llama is not served: no worker.")
    assert found.sentence.endswith("(2 more below.)")


def test_workers_with_one_problem_are_one_problem() -> None:
    refused = [
        replace(GOOD, worker_id=f"d-{i}", state="refused", reason="tokenizer differs") for i in range(40)
    ]
    (problem,) = problems_of(replace(WELL, workers=refused))
    assert problem.text == "40 workers (d-0, d-1, d-2, …) are refused (tokenizer differs)"
