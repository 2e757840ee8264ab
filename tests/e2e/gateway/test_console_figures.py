"""What the console says of requests that are known in each detail, and what it does by keyboard."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.kit.browser.console_views import figure, lines_of, pick, pictured, rows, tab_to
from tests.kit.browser.tab import Tab
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import WorkerStats
from kvasir.core.requests import FinishReason, Role, ToolCallDelta, Usage
from kvasir.ports.router import CandidateRecord, DecisionRecord, PhaseRecord, RequestSummary, WorkerView
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.costs.memory_store import MemoryCosts

MODEL = "kvasir-tiny"
STORY = "Once upon a time there was a router that knew what every worker holds. " * 20
LEGEND = "In the beginning nobody remembered a prompt, and all of it was computed again. " * 40


def console(edge: Any, view: str = "fleet") -> str:
    return f"http://{edge.host}:{edge.port}/console/#/{view}"


def answered(count: int) -> list[RequestSummary]:
    """Requests that ended, with a TTFT of so many hundredths of a second, and a tenth of that as ITL."""
    begun = MonotonicClock().now() - 10.0
    firsts = [begun + number / 100 for number in range(1, count + 1)]
    usage = Usage(prompt_tokens=200, cached_tokens=50, output_tokens=5)
    return [
        RequestSummary(
            f"r{i}", MODEL, "ok", begun, first + 0.4 * (first - begun), first_token_s=first, usage=usage
        )
        for i, first in enumerate(firsts)
    ]


async def test_figures_of_a_minute_count_all_its_requests_and_unknown_ones_are_gaps(
    start: Any, tab: Tab
) -> None:
    edge = await start()
    await tab.open(console(edge))
    assert await figure(tab, "TTFT, median", "none in 60 s") == "–"
    for known in (1, 2):
        edge.router.summaries = answered(100)
        assert await figure(tab, "TTFT, median", "p95 950 ms, 100 in 60 s") == "500 ms"
        assert await figure(tab, "ITL, median", "p95 95.0 ms") == "50.0 ms"
        assert await figure(tab, "prefix hit rate", "of prompts, in 60 s") == "25 %"
        edge.router.summaries = []
        assert await figure(tab, "ITL, median", "none in 60 s") == "–"
        assert await tab.until(lines_of("TTFT, median")) == known
    assert tab.console == []


def place(worker: str, cached: int, queue_s: float, prefill_s: float, *, chosen: bool) -> CandidateRecord:
    terms = {"queue_s": queue_s, "prefill_s": prefill_s}
    total = queue_s + prefill_s
    return CandidateRecord(
        worker, 0, "prefill", "exact", {"cached_tokens": cached}, terms, total, chosen=chosen
    )


class MeasuredWorkers:
    """A worker that prefills and one that decodes, whose rates are known."""

    def workers(self) -> list[WorkerView]:
        return []

    def worker_figures(self) -> list[WorkerStats]:
        return [
            WorkerStats("prefill-0", "first", Role.PREFILL, True, 0.01, 0.001, 0.0, 0.0, 0, 3000, 0, 0),
            WorkerStats("decode-1", "second", Role.DECODE, True, 0.01, 0.001, 0.05, 0.01, 0, 3030, 0, 0),
        ]


async def test_a_request_shows_its_stages_its_claims_the_terms_of_its_decision_and_its_regret(
    start: Any, tab: Tab
) -> None:
    costs = CostKeeper(Deployment(), "router-test", MemoryCosts(), MonotonicClock(), time.time)
    costs.ledger.source = MeasuredWorkers()
    edge = await start(costs=costs)
    places = (
        place("prefill-0", 64, 0.0125, 0.2, chosen=True),
        place("prefill-1", 0, 0.001, 0.3, chosen=False),
    )
    edge.router.records["r"] = DecisionRecord(
        "r", "cost", "cache", "disaggregated", 10.25, 1e-5, 1, 300, 8, "default",
        prefill_worker="prefill-0", decode_worker="decode-1", predicted_cached_tokens=64,
        predicted_ttft_s=1.0, parts=(PhaseRecord("prefill", "s", places),), outcome="ok", regret_s=0.05,
        regret_causes={"queue": 0.02, "cache": 0.03}, better=("prefill prefill-1",),
    )  # fmt: skip
    edge.router.summaries = [
        RequestSummary(
            "r", MODEL, "ok", 10.0, 12.0, routed_s=10.25, prefill_done_s=11.0, first_token_s=11.5,
            pulled_s=0.125, prefill_worker="prefill-0", decode_worker="decode-1", started_s=10.25,
            usage=Usage(prompt_tokens=300, cached_tokens=64, output_tokens=6),
        )
    ]  # fmt: skip
    await tab.open(console(edge, "requests/r"))
    first, second = await rows(tab, "Candidates: prefill")
    assert (first["worker"], first["cached"]) == ("✓ prefill-0", "64")
    assert (first["queue"], first["prefill"], first["total"]) == ("12.50", "200.00", "212.50")
    assert (second["queue"], second["prefill"], second["total"]) == ("1.00", "300.00", "301.00")
    lanes = "[...document.querySelectorAll('.lane')].map((each) => each.innerText.split(/\\s*\\n\\s*/))"
    assert [[part for part in lane if part] for lane in await tab.until(lanes)] == [
        ["router queue", "250 ms"],
        ["prefill", "750 ms", "prefill-0"],
        ["KV transfer", "125 ms", "decode-1"],
        ["to the first token", "375 ms", "decode-1"],
        ["stream", "500 ms", "decode-1"],
    ]
    assert [list(each.values()) for each in await rows(tab, "Claims on workers")] == [
        ["prefill-0", "first", "236 ms", "0 ms", "75.0 ms", "12.5 ms", "0 ms"],
        # Steps of 0.1 s: five streams share each of them.
        ["decode-1", "second", "0 ms", "100 ms", "87.5 ms", "12.5 ms", "0 ms"],
    ]
    await tab.shows("Claims are proportions")
    causes = "cache 30.0 ms, queue 20.0 ms"
    await tab.shows(f"50.0 ms of cost ({causes}); prefill prefill-1 would have cost less")
    await pictured(tab, "regret")


def follow_rules(stream: ScriptedStream) -> None:
    """Answer with JSON where a schema is asked for, and else with a call of a tool."""
    if stream.request.sampling.structured is not None:
        stream.emit('{"answer": ')
        stream.emit('"mead"}', finish=FinishReason.STOP)
    else:
        call = ToolCallDelta(0, call_id="call_0", name="weather", arguments='{"city": "Oslo"}')
        stream.emit("", tool_calls=(call,), finish=FinishReason.STOP)
    stream.finish()


async def test_the_playground_sends_its_examples_of_a_schema_and_of_tools(start: Any, tab: Tab) -> None:
    edge = await start(capabilities=ModelCapabilities(tools=True))
    edge.router.script = follow_rules
    schema, tools = (f"textarea[aria-label='{name}'] + button" for name in ("JSON schema", "Tools"))
    await tab.open(console(edge, "playground"))
    await pick(tab, 0, "Model", MODEL)
    for name in ("JSON schema", "Tools"):
        await tab.click(f"details:has(textarea[aria-label='{name}']) summary")
    await tab.click(schema)
    await tab.type("textarea[aria-label=Prompt]", "What did Kvasir become?\n")
    answer = await tab.until("document.querySelector('.answer:has(.timing) .text')?.innerText")
    assert json.loads(answer) == {"answer": "mead"}
    asked = edge.router.streams[0].request
    assert json.loads(asked.sampling.structured.spec)["required"] == ["answer"]

    await tab.until("document.querySelector('.composer button[type=submit]')")
    await tab.click(schema)
    await tab.click(tools)
    await tab.type("textarea[aria-label=Prompt]", "Does it rain there?\n")
    assert await tab.until("document.querySelector('.answer pre')?.innerText") == 'weather({"city": "Oslo"})'
    asked = edge.router.streams[1].request
    assert asked.sampling.structured is None
    assert json.loads(asked.parsing.tools)[0]["function"]["name"] == "weather"
    await pictured(tab, "tools")
    # The scripted router keeps no decisions.
    assert [each for each in tab.console if "404" not in each] == []


async def test_prefixes_are_ordered_by_the_tokens_they_save_and_show_no_salt(product: Any, tab: Tab) -> None:
    salt = "pepper-of-acme"
    for text, more in ((STORY, {}), (LEGEND, {}), (STORY, {"cache_salt": salt})):
        for ending in ("The end. " * 20, "They lived happily. " * 20):
            await product.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": text + ending}],
                max_tokens=1,
                extra_body=more,
            )
    await tab.open(f"http://{product.address}/console/#/prefixes")
    found = await rows(tab, f"Prefixes of {MODEL}")
    assert len(found) == 3
    assert {each["prompts"] for each in found} == {"2"}
    # Two prompts that share a prefix save it once.
    assert [each["tokens saved"] for each in found] == [each["tokens"] for each in found]
    longest, *others = [int(each["tokens saved"].replace(",", "")) for each in found]
    assert len(set(others)) == 1
    assert longest > others[0] > 300
    assert salt not in await tab.until("document.documentElement.outerHTML")


async def test_requests_are_sorted_and_opened_with_the_keyboard(product: Any, tab: Tab) -> None:
    for i, tokens in enumerate((8, 40, 1)):
        await product.ask(max_tokens=tokens, **{"x-request-id": f"mine-{i}"})
    await tab.open(f"http://{product.address}/console/#/requests")
    ended = "[aria-label='Requests that ended']"
    names = [each["output"] for each in await rows(tab, "Requests that ended")]
    assert names == ["1", "40", "8"]
    at = [*(await rows(tab, "Requests that ended"))[0]].index("output") + 1
    await tab_to(tab, f"{ended} th:nth-child({at}) button")
    await tab.press("Enter")
    await tab.until(f"document.querySelector(\"{ended} th[aria-sort=descending]\")?.innerText === 'output ↓'")
    assert [each["output"] for each in await rows(tab, "Requests that ended")] == ["40", "8", "1"]
    await tab_to(tab, f"{ended} tbody a")
    await tab.press("Enter")
    await tab.until("location.hash.startsWith('#/requests/mine-1')")
    await tab.shows("SLO default")
