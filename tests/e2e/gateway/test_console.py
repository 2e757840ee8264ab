"""The console in a browser, over the real gateway and router: each view shows numbers that the test caused.
Screenshots are kept in build/screenshots."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from tests.kit.browser.console_views import pick, pictured, rows
from tests.kit.browser.tab import Tab

from kvasir.core.demand import PoolForecast, PoolPlan
from kvasir.core.loads.gpu import GpuLoad
from kvasir.ports.router import WorkerView

STORY = "Once upon a time there was a router that knew what every worker holds. " * 20
ENDINGS = ("The end. " * 20, "They lived happily. " * 20, "")


async def test_each_view_shows_what_happened(product: Any, tab: Tab) -> None:
    console = f"http://{product.address}/console"
    for i in range(3):
        await product.ask(STORY + ENDINGS[i], **{"x-request-id": f"mine-{i}"})
    running = asyncio.create_task(product.ask(max_tokens=3500, **{"x-request-id": "long"}))

    await tab.open(console)
    await tab.shows("All is well")
    await tab.until("document.querySelector('.figures')?.innerText.includes('3 in 60 s')")
    workers = await rows(tab, "Workers")
    assert {each["pool"] for each in workers} == {"prefill", "decode"}
    assert len(workers) == 4
    assert {each["state"].split()[-1] for each in workers} == {"ready"}
    assert max(int(each["blocks"].split()[0]) for each in workers) > 0
    assert sum(int(each["in flight"]) for each in workers) == 1
    (queue,) = await rows(tab, "Models and queues")
    assert (queue["model"], queue["queued"]) == ("kvasir-tiny", "0")
    await pictured(tab, "fleet")

    await tab.open(f"{console}/#/requests")
    (live,) = await rows(tab, "Running requests")
    assert live["request"].startswith("long")
    assert live["phase"].endswith("decoding")
    ended = await rows(tab, "Requests that ended")
    assert [each["request"][:6] for each in ended] == ["mine-2", "mine-1", "mine-0"]
    assert [each["output"] for each in ended] == ["8"] * 3
    assert int(ended[0]["cached"].split()[0]) > 50
    assert ended[2]["cached"] == "0 %"
    await pictured(tab, "requests")

    await tab.click("[aria-label='Requests that ended'] tbody a")
    await tab.shows("SLO default")
    assert await tab.until("String(document.querySelectorAll('[aria-label=Claims]').length)") == "0"
    places = await rows(tab, "Candidates: prefill")
    assert len(places) == 2
    assert places[0]["worker"].startswith("✓ prefill-")
    assert float(places[0]["total"]) <= float(places[1]["total"])
    phases = await tab.until("document.querySelector('.waterfall').innerText")
    assert "prefill" in phases
    assert "stream" in phases
    await pictured(tab, "request")

    await tab.open(f"{console}/#/playground")
    await pick(tab, 0, "Model", "kvasir-tiny")
    await tab.type("textarea[aria-label=Prompt]", "Tell me of Kvasir.\n")
    await tab.until("document.querySelector('.timing')?.innerText.includes('finish')")
    timing = await tab.until("document.querySelector('.timing').innerText")
    assert "256" in timing
    assert "length" in timing
    await pictured(tab, "playground")

    await tab.open(f"{console}/#/scaling")
    pools = await rows(tab, "Pools")
    assert [(each["pool"], each["desired"], each["serving"]) for each in pools] == [
        ("prefill", "2", "2"), ("decode", "2", "2"),
    ]  # fmt: skip
    await pictured(tab, "scaling")

    await tab.open(f"{console}/#/prefixes")
    (prefix,) = await rows(tab, "Prefixes of kvasir-tiny")
    assert int(prefix["tokens"]) > 300
    assert prefix["prompts"] == str(len(ENDINGS))
    assert "prefill-" in prefix["workers"]
    await pictured(tab, "prefixes")

    await tab.open(f"{console}/#/tenants")
    (tenant,) = await rows(tab, "Tenants")
    assert (tenant["tenant"], tenant["requests"], tenant["running"]) == ("default", "5", "1")
    assert int(tenant["output tokens"]) == 3 * 8 + 256
    await pictured(tab, "tenants")

    running.cancel()
    assert tab.console == []
    assert all(address.startswith(f"http://{product.address}/") for address in tab.asked), tab.asked


ANSWERED = "[...document.querySelectorAll('.timing')].filter((each) => each.innerText.includes('ran on'))"


async def test_the_same_prompt_is_answered_by_two_workers_and_two_policies_side_by_side(
    product: Any, tab: Tab
) -> None:
    await tab.open(f"http://{product.address}/console#/playground")
    await pick(tab, 0, "Model", "kvasir-tiny")
    await tab.click(".playground .check input")
    await pick(tab, 0, "Worker", "decode-2")
    await pick(tab, 1, "Worker", "decode-3")
    await tab.type("textarea[aria-label=Prompt]", "Where do you run?\n")
    await tab.until(f"{ANSWERED}.length === 2")
    first, second = await tab.until(f"{ANSWERED}.map((each) => each.innerText)")
    assert "decode-2" in first
    assert "decode-3" in second
    assert all(
        name in each for each in (first, second) for name in ("TTFT", "ITL", "tokens/s", "policy\ncost")
    )
    await pictured(tab, "side-by-side")

    for side, policy in enumerate(("round_robin", "least_loaded")):
        await pick(tab, side, "Worker", "")
        await pick(tab, side, "Policy", policy)
    await tab.type("textarea[aria-label=Prompt]", "And as others would place you?\n")
    await tab.until(f"{ANSWERED}.length === 4")
    third, fourth = (await tab.until(f"{ANSWERED}.map((each) => each.innerText)"))[2:]
    assert "policy\nround_robin" in third
    assert "policy\nleast_loaded" in fourth
    assert tab.console == []


async def test_a_lost_worker_is_named_with_the_reason(product: Any, tab: Tab) -> None:
    await tab.open(f"http://{product.address}/console")
    await tab.shows("All is well")
    await product.cluster.kill("decode-3")
    await tab.until("document.querySelector('.verdict:not(.good)')")
    await tab.click(".tools input[type=checkbox]")
    await tab.until("document.querySelectorAll('[aria-label=Workers] tbody tr').length === 1")
    (lost,) = await rows(tab, "Workers")
    assert lost["worker"] == "decode-3"
    assert lost["state"].endswith("interrupted") or lost["state"].endswith("connecting")
    assert "decode" in await tab.until("document.querySelector('.verdict').innerText")
    await pictured(tab, "trouble")


async def test_gpus_have_columns_where_a_worker_has_any(product: Any, tab: Tab) -> None:
    await tab.open(f"http://{product.address}/console")
    (*_, plain) = await rows(tab, "Workers")
    assert "GPU" not in plain
    gpus = (GpuLoad(0, 0.9, 60, 80, 500.0, 0.5, 0.8), GpuLoad(1, 0.9, 20, 80, 500.0, 0.3, 0.8))
    product.cluster.workers["decode-2"].faults.gpus = gpus
    await tab.until("document.querySelector('[aria-label=Workers] thead').innerText.includes('GPU memory')")
    shown = {each["worker"]: (each["GPU"], each["GPU memory"]) for each in await rows(tab, "Workers")}
    assert shown["decode-2"] == ("40 %", "50 %")
    assert shown["decode-3"] == ("–", "–")
    await pictured(tab, "gpus")


async def test_a_forecast_is_shown_with_its_band_and_the_planners_reasons(start: Any, tab: Tab) -> None:
    edge = await start()
    forecast = PoolForecast(0.75, 1.25, 1.5, ("the forecast needs 2", "min is 1"))
    edge.metrics.track_scaling(lambda: {"decode": PoolPlan(0, 0, 0, True, forecast)}, lambda: 0.0)
    await tab.open(f"http://{edge.host}:{edge.port}/console#/scaling")
    pools = {each["pool"]: each for each in await rows(tab, "Pools")}
    assert (pools["decode"]["load"], pools["decode"]["forecast"]) == ("0.75", "1.25 to 1.50")
    assert pools["decode"]["reason"].endswith("the forecast needs 2; min is 1")
    assert pools["prefill"]["forecast"] == "–"
    await tab.until("document.querySelectorAll('.band').length === 1")
    await tab.until("document.querySelector('.band polyline').points.length > 2")
    await pictured(tab, "forecast")
    at = "document.querySelector('.scroll[aria-label=Pools]')"
    assert await tab.until(f"{at}.scrollWidth") <= await tab.until(f"{at}.clientWidth")


@pytest.mark.parametrize(
    ("desired", "starting", "shown"),
    [
        (3, 1, "growing 1 of its replicas still start"),
        (3, 0, "short replicas are missing and none is starting: see the verdict on the fleet"),
        (2, 0, "steady it has its desired size"),
        (1, 0, "shrinking replicas beyond the desired size drain and leave"),
    ],
)
async def test_the_planners_reasons_follow_what_a_pool_does(
    start: Any, tab: Tab, desired: int, starting: int, shown: str
) -> None:
    edge = await start()
    edge.router.views = [WorkerView(f"decode-{i}", "127.0.0.1:1", "decode", "ready") for i in range(2)]
    plan = PoolPlan(
        desired, 2, starting, True, PoolForecast(1.6, 1.8, 2.1, ("the margin is 1.2", "max is 3"))
    )
    edge.metrics.track_scaling(lambda: {"decode": plan}, lambda: 0.0)
    await tab.open(f"http://{edge.host}:{edge.port}/console#/scaling")
    pools = {each["pool"]: each for each in await rows(tab, "Pools")}
    assert (pools["decode"]["desired"], pools["decode"]["serving"]) == (str(desired), "2")
    assert " ".join(pools["decode"]["reason"].split()[1:]) == f"{shown}; the margin is 1.2; max is 3"


async def test_views_are_reached_with_the_keyboard(product: Any, tab: Tab) -> None:
    await tab.open(f"http://{product.address}/console")
    await tab.shows("All is well")
    focused = []
    for _ in range(3):
        await tab.press("Tab")
        focused.append(await tab.until("document.activeElement.innerText"))
    assert focused == ["Skip to the content", "Fleet", "Requests"]
    outline = await tab.until("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    await tab.press("Enter")
    await tab.shows("No request runs.")
    await tab.until("document.querySelector('nav [aria-current]').innerText === 'Requests'")


async def test_an_address_that_is_not_encoded_is_shown_as_it_is(product: Any, tab: Tab) -> None:
    await tab.open(f"http://{product.address}/console/#/requests/50%")
    await tab.shows("Nothing is known of 50%.")
    assert [each for each in tab.console if "404" not in each] == []


async def test_the_theme_that_is_chosen_goes_before_the_system_s(product: Any, tab: Tab) -> None:
    await tab.open(f"http://{product.address}/console")
    await tab.shows("All is well")
    light, dark = "rgb(246, 247, 249)", "rgb(18, 21, 26)"
    for system, asked, shown in (
        ("light", "auto", light), ("dark", "auto", dark), ("dark", "light", light), ("light", "dark", dark),
    ):  # fmt: skip
        await tab.screenshot("console-theme", dark=system == "dark")
        await tab.until(
            f"((at) => (at.value = '{asked}', at.dispatchEvent(new Event('change')), true))"
            "(document.querySelector('.theme select'))"
        )
        await tab.until(f"getComputedStyle(document.documentElement).backgroundColor === '{shown}'")


async def test_the_page_asks_for_the_key_and_keeps_it_out_of_addresses(
    start: Any, tab: Tab, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"good").hexdigest())
    edge = await start(api_keys_file=str(keys))
    await tab.open(f"http://{edge.host}:{edge.port}/console")
    await tab.shows("API key of an operator")
    await tab.screenshot("console-sign-in", height=600)
    await tab.type("input[name=key]", "bad\n")
    await tab.until("document.querySelector('[role=alert]')")
    await tab.type("input[name=key]", "good\n")
    await tab.shows("The router knows no worker.")
    assert not [address for address in tab.asked if "good" in address or "bad" in address]
