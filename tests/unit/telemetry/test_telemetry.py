"""Metrics count what happened, spans show when, and the vocabulary of outcomes is closed."""

from __future__ import annotations

import io
import json
import logging
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvasir.core import errors
from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.requests import EngineLoad, SloClass, Usage
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir.telemetry.logs import FAILED_PER_S, JsonFormatter, RequestLog
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.reasons import REASONS, http_status, markdown_table, outcome_label, with_table
from kvasir.telemetry.request_series import trace_id_of
from kvasir.telemetry.spans import SpanRecorder, TraceContext, otlp_recorder

FIRST_TOKEN = "kvasir_time_to_first_token_seconds"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
SUMMARY = RequestSummary(
    request_id="r",
    model="m",
    outcome="ok",
    arrival_s=10.0,
    routed_s=10.2,
    prefill_done_s=10.5,
    first_token_s=11.0,
    finished_s=12.0,
    transfer_s=0.25,
    prefill_worker="p-0",
    decode_worker="d-0",
    usage=Usage(
        prompt_tokens=100, cached_tokens=64, transferred_tokens=96, transferred_bytes=4096, output_tokens=11
    ),
    trace_context=f"00-{TRACE}-{SPAN}-01",
)


def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), ["m"])


def test_a_finished_request_fills_counters_and_histograms() -> None:
    made = metrics()
    made.request_finished(SUMMARY)
    shown = made.render().decode()
    for line in (
        'kvasir_requests_total{model="m",outcome="ok"} 1.0',
        'kvasir_prompt_tokens_total{model="m"} 100.0',
        'kvasir_output_tokens_total{model="m"} 11.0',
        'kvasir_cached_tokens_total{model="m"} 64.0',
        'kvasir_transferred_bytes_total{model="m"} 4096.0',
        'kvasir_time_to_first_token_seconds_bucket{le="1.0",model="m"} 1.0',
        'kvasir_time_to_first_token_seconds_bucket{le="0.5",model="m"} 0.0',
        'kvasir_request_duration_seconds_sum{model="m"} 2.0',
        'kvasir_transfer_seconds_sum{model="m"} 0.25',
        'kvasir_time_per_output_token_seconds_sum{model="m"} 0.1',
    ):
        assert line in shown


def test_unknown_models_and_codes_share_one_label() -> None:
    made = metrics()
    for i in range(50):
        made.request_refused(f"code-{i}", f"model-{i}")
    assert 'kvasir_requests_total{model="other",outcome="other"} 50.0' in made.render().decode()


def test_inter_token_latency_counts_every_token() -> None:
    made = metrics()
    series = made.inter_token("m")
    series.observe(0.004, 3)
    series.observe(2.0)
    shown = made.render().decode()
    assert 'kvasir_inter_token_latency_seconds_bucket{le="0.0025",model="m"} 0.0' in shown
    assert 'kvasir_inter_token_latency_seconds_bucket{le="0.005",model="m"} 3.0' in shown
    assert 'kvasir_inter_token_latency_seconds_bucket{le="+Inf",model="m"} 4.0' in shown


def test_a_gone_worker_leaves_no_series() -> None:
    made = metrics()
    views = [WorkerView(n, "a", "decode", "ready", load=EngineLoad(running=2)) for n in ("w-0", "w-1")]
    made.workers(views)
    assert 'kvasir_workers{pool="decode",state="ready"} 2.0' in made.render().decode()
    made.workers(views[1:])
    shown = made.render().decode()
    assert "w-0" not in shown
    assert 'kvasir_worker_running{pool="decode",worker="w-1"} 2.0' in shown
    made.workers([])
    assert "w-1" not in made.render().decode()


def test_gauges_are_read_at_scrape() -> None:
    made = metrics()
    made.track_in_flight(lambda: 7)
    made.track_queued(lambda: 3)
    made.track_tasks(lambda: 9)
    shown = made.render().decode()
    assert "kvasir_requests_in_flight 7.0" in shown
    assert "kvasir_requests_queued 3.0" in shown
    assert "kvasir_event_loop_tasks 9.0" in shown


PARENT = f"00-{TRACE}-{SPAN}-01"


def recorded(
    *summaries: RequestSummary, parent: str = PARENT, state: str = ""
) -> tuple[InMemorySpanExporter, SpanRecorder, TraceContext]:
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder(
        SimpleSpanProcessor(exporter), "kvasir", lambda: 1_000_000_000_000, random.Random(7)
    )
    trace = recorder.begin(parent, state)
    missed = any(each.slo_met is False for each in summaries)
    recorder.record(trace, summaries, now_s=12.0, admitted_s=10.1, missed=missed)
    return exporter, recorder, trace


def test_a_request_is_one_span_tree_under_the_clients() -> None:
    exporter, recorder, trace = recorded(replace(SUMMARY, route_s=0.01, tier_s=0.1), state="a=1,b=2")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("request")
    assert root.parent is not None
    assert root.context is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert dict(root.context.trace_state) == {"a": "1", "b": "2"}
    assert trace.own == f"00-{TRACE}-{root.context.span_id:016x}-01", "the client was told of this span"
    assert trace.onward == f"{trace.own} a=1,b=2"
    assert list(spans) == ["admit", "queue", "route", "tier", "prefill", "transfer", "decode"]
    assert all(span.parent and span.parent.span_id == root.context.span_id for span in spans.values())
    assert len({span.context.span_id for span in spans.values() if span.context}) == len(spans)
    assert (root.start_time, root.end_time) == (998_000_000_000, 1_000_000_000_000)
    times = {n: ((s.start_time or 0) / 1e9 - 988, (s.end_time or 0) / 1e9 - 988) for n, s in spans.items()}
    expected = {
        "admit": (10.0, 10.1),
        "queue": (10.1, 10.2),
        "route": (10.2, 10.21),
        "tier": (10.2, 10.3),
        "prefill": (10.2, 10.5),
        "transfer": (10.5, 10.75),
        "decode": (10.75, 12.0),
    }
    assert times == {name: pytest.approx(pair, abs=1e-6) for name, pair in expected.items()}
    recorder.close()


@pytest.mark.parametrize(
    ("transfer_s", "expected"),
    [
        (0.0, {"prefill": (10.2, 11.0), "decode": (11.0, 12.0)}),
        (0.25, {"prefill": (10.2, 10.75), "transfer": (10.75, 11.0), "decode": (11.0, 12.0)}),
    ],
    ids=["on one worker", "apart in another cell"],
)
def test_the_prefill_of_a_request_without_a_time_of_its_own_ends_before_the_first_token(
    transfer_s: float, expected: dict[str, tuple[float, float]]
) -> None:
    usage = replace(SUMMARY.usage, transferred_tokens=0, transferred_bytes=0)
    summary = replace(SUMMARY, prefill_worker=None, prefill_done_s=None, transfer_s=transfer_s, usage=usage)
    exporter, recorder, _ = recorded(summary)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    times = {n: ((s.start_time or 0) / 1e9 - 988, (s.end_time or 0) / 1e9 - 988) for n, s in spans.items()}
    assert times.keys() == {"request", "admit", "queue", "route", *expected}
    assert {n: times[n] for n in expected} == {n: pytest.approx(t, abs=1e-6) for n, t in expected.items()}
    recorder.close()


def test_a_call_with_several_prompts_is_one_tree_too() -> None:
    second = replace(SUMMARY, request_id="r-1", outcome="worker_lost", finished_s=12.5)
    exporter, recorder, trace = recorded(SUMMARY, second, parent="")
    *rest, root = exporter.get_finished_spans()
    prompts = [span for span in rest if span.name == "prompt"]
    assert root.context is not None
    assert root.parent is None
    assert trace.own == f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"
    assert {span.parent.span_id for span in prompts if span.parent} == {root.context.span_id}
    assert [(s.attributes or {})["kvasir.request_id"] for s in prompts] == ["r", "r-1"]
    assert (root.attributes or {})["kvasir.output_tokens"] == 22
    assert root.status.description == "worker_lost"
    assert root.end_time == 1_000_500_000_000
    recorder.close()


def test_a_client_that_does_not_sample_its_trace_is_not_sampled_here() -> None:
    exporter, recorder, trace = recorded(SUMMARY, parent=f"00-{TRACE}-{SPAN}-00")
    assert trace.own.startswith(f"00-{TRACE}-")
    assert trace.own.endswith("-00")
    assert exporter.get_finished_spans() == ()
    recorder.close()


SLOW = replace(SUMMARY, slo=SloClass("chat", ttft_s=0.1, itl_s=1.0))


@pytest.mark.parametrize(
    ("ended", "parent", "written"),
    [
        (SUMMARY, "", False),
        (SLOW, "", True),
        (replace(SUMMARY, outcome="worker_lost"), "", True),
        (SLOW, f"00-{TRACE}-{SPAN}-00", False),
        (SUMMARY, PARENT, True),
    ],
    ids=["quick", "slow", "failed", "the client samples not", "the client samples"],
)
def test_under_tail_sampling_slow_and_failed_calls_are_recorded(
    ended: RequestSummary, parent: str, written: bool
) -> None:
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder(
        SimpleSpanProcessor(exporter), "kvasir", lambda: 10**12, random.Random(7), share=0.0
    )
    trace = recorder.begin(parent)
    missed = ended.slo_met is False
    recorder.record(trace, [ended], now_s=12.0, admitted_s=10.1, missed=missed)
    assert bool(exporter.get_finished_spans()) is written
    assert trace.onward.endswith("-00 kvasir=tail") is (parent == "")
    roots = [span for span in exporter.get_finished_spans() if span.name == "request"]
    assert all(span.context and f"{span.context.span_id:016x}" == trace.own[36:52] for span in roots)
    assert trace_id_of(trace.onward, missed=missed) == (trace.own[3:35] if written else "")
    recorder.close()


def test_a_share_of_traces_is_recorded_whole() -> None:
    recorder = SpanRecorder(
        SimpleSpanProcessor(InMemorySpanExporter()), "kvasir", rng=random.Random(7), share=0.25
    )
    whole = sum(recorder.begin().own.endswith("-01") for _ in range(400))
    assert 70 < whole < 130
    recorder.close()


def test_traces_beyond_those_of_one_second_are_recorded_only_if_slow_or_failed() -> None:
    seconds = iter((7.1, 7.5, 7.9, 8.0, 8.2, 8.9))
    recorder = SpanRecorder(
        SimpleSpanProcessor(InMemorySpanExporter()), "kvasir", lambda: int(next(seconds) * 1e9), most_per_s=2
    )
    begun = [recorder.begin() for _ in range(6)]
    assert [trace.own.endswith("-01") for trace in begun] == [True, True, False, True, True, False]
    assert [trace.state for trace in begun] == ["", "", "kvasir=tail", "", "", "kvasir=tail"]
    recorder.close()


def test_latencies_show_the_trace_of_a_request_as_openmetrics() -> None:
    made = metrics()
    made.request_finished(replace(SUMMARY, trace_context=PARENT))
    exposed = b"".join(made.openmetrics_parts()).decode()
    families = text_string_to_metric_families(exposed)  # type: ignore[no-untyped-call]
    (family,) = [each for each in families if each.name == FIRST_TOKEN]
    assert {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar} == {TRACE}
    assert TRACE not in made.render().decode()


def test_metric_by_metric_they_are_what_prometheus_client_renders_together() -> None:
    registry = CollectorRegistry()
    made = Metrics(registry, ["m"])
    made.request_finished(replace(SUMMARY, trace_context=PARENT))
    made.request_refused("queue_full", "m")
    load = EngineLoad(running=2)
    made.workers([WorkerView(name, "a", "decode", "ready", load=load) for name in ("w-0", 'a "b" {c}')])
    text = list(made.parts())
    assert len(text) > 50
    assert b"".join(text) == made.render() == generate_latest(registry)
    exposed = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    assert b"".join(made.openmetrics_parts()) == exposed


def test_a_request_that_never_was_routed_has_only_its_queue() -> None:
    exporter, recorder, _ = recorded(
        RequestSummary("r", "m", outcome="queue_timeout", arrival_s=10.0, finished_s=12.0), parent=""
    )
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["admit", "queue", "request"]
    assert spans[-1].parent is None
    assert not spans[-1].status.is_ok
    recorder.close()


def test_without_a_collector_tracing_is_not_even_imported() -> None:
    assert otlp_recorder(None, "kvasir") is None
    code = (
        "import sys, kvasir.telemetry.spans as spans; spans.otlp_recorder(None, 'k'); "
        "print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run(  # the path of this process's packages, without what its tests imported
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_the_errors_page_prints_the_vocabulary() -> None:
    page = (Path(__file__).parents[3] / "docs" / "errors.md").read_text()
    assert markdown_table() in page, "run `make pages`"
    assert with_table(page) == page
    assert with_table(page.replace("| 400 |", "| 499 |")) == page


def test_each_code_stands_once_in_the_vocabulary() -> None:
    assert markdown_table().count("\n") == len(REASONS) + 2


def test_every_code_of_the_error_tree_is_in_the_vocabulary() -> None:
    everything = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in everything if issubclass(kind, KvasirError)]
    assert {kind.code for kind in kinds} <= set(REASONS)


def test_every_code_that_router_and_gateway_raise_is_in_the_vocabulary() -> None:
    root = Path(__file__).parents[3]
    sources = [*root.glob("router/**/*.py"), *root.glob("platform/kvasir_platform/gateway/*.py")]
    raised = {code for path in sources for code in re.findall(r'code="([a-z_]+)"', path.read_text())}
    assert len(raised) > 10
    assert raised <= set(REASONS)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("x", status=404, code="model_not_found"), 404),
        (CapacityError("x", code="queue_full"), 503),
        (CapacityError("x", code="unheard"), 503),
        (UpstreamError("x", code="unheard"), 502),
        (KvasirError("x", code="request_timeout"), 504),
        (KvasirError("x", code="client_closed"), 500),
        (KvasirError("x"), 500),
    ],
)
def test_every_error_has_a_status(error: KvasirError, status: int) -> None:
    assert http_status(error) == status


def test_outcome_labels_are_closed() -> None:
    assert [outcome_label(code) for code in ("ok", "queue_full", "x" * 99)] == ["ok", "queue_full", "other"]


def test_a_log_line_is_one_json_object() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("kvasir.test")
    logger.addHandler(handler)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it %s", "broke", extra={"request_id": "r-1", "path": Path("x")})
    line = stream.getvalue()
    assert line.count("\n") == 1
    shown = json.loads(line)
    assert (shown["level"], shown["message"], shown["request_id"]) == ("error", "it broke", "r-1")
    assert shown["path"] == "x"
    assert "two\nlines" in shown["exception"]


def logged(*ended: RequestSummary, every: bool = False) -> list[dict[str, object]]:
    """The lines that these requests get."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("kvasir.requests")
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO
    try:
        log = RequestLog(every=every)
        for summary in ended:
            log.ended(summary)
    finally:
        logger.level = before
        logger.removeHandler(handler)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


FAILED = replace(SUMMARY, outcome="worker_lost", tenant="acme")


def test_a_request_that_failed_has_a_line_with_its_ids_and_without_content() -> None:
    (line,) = logged(SUMMARY, FAILED, replace(SUMMARY, outcome="client_closed"))
    assert (line["level"], line["message"], line["outcome"]) == ("warning", "a request failed", "worker_lost")
    assert (line["request_id"], line["tenant"], line["trace_id"]) == ("r", "acme", TRACE)
    assert (line["decode_worker"], line["queued_s"], line["ttft_s"], line["e2e_s"]) == ("d-0", 0.2, 1.0, 2.0)
    assert (line["prompt_tokens"], line["output_tokens"]) == (100, 11)


def test_lines_of_failed_requests_are_bounded_and_those_left_out_are_counted() -> None:
    burst = [replace(FAILED, finished_s=12.0 + each / 100) for each in range(FAILED_PER_S + 7)]
    lines = logged(*burst, replace(FAILED, finished_s=13.5), replace(FAILED, finished_s=13.6))
    assert len(lines) == FAILED_PER_S + 2
    assert [line.get("omitted") for line in lines[-3:]] == [None, 7, None]


def test_each_request_has_a_line_where_that_is_asked_for() -> None:
    burst = [replace(FAILED, finished_s=12.0)] * (FAILED_PER_S + 7)
    lines = logged(SUMMARY, replace(SUMMARY, outcome="client_closed"), *burst, every=True)
    assert [line["outcome"] for line in lines[:2]] == ["ok", "client_closed"]
    assert len(lines) == len(burst) + 2
