"""The console in a browser, over the real gateway and router: each view shows numbers that the test caused.
Screenshots are kept in build/screenshots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from tests.kit.browser.tab import Tab, opened_tab

ROWS = """((label) => {
  const table = document.querySelector(`[aria-label="${label}"] table`);
  if (!table?.tBodies[0]?.rows.length) return null;
  const names = [...table.tHead.rows[0].cells].map((each) => each.innerText.replace(/ [↓↑]$/, ""));
  return [...table.tBodies[0].rows].map((row) =>
    Object.fromEntries([...row.cells].map((cell, i) => [names[i], cell.innerText])));
})"""


@pytest_asyncio.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with opened_tab(tmp_path / "profile") as tab:
        yield tab


async def rows(tab: Tab, label: str) -> list[dict[str, str]]:
    """The rows of a table, once it has any, by the names of its columns."""
    return list(await tab.until(f"{ROWS}({json.dumps(label)})"))


async def test_each_view_shows_what_happened(product: Any, tab: Tab) -> None:
    for _ in range(3):
        await product.ask()
    await tab.open(f"http://{product.address}/console")
    await tab.shows("prefix hit rate")
    workers = await rows(tab, "Workers")
    assert {each["pool"] for each in workers} == {"prefill", "decode"}
    assert len(workers) == 4
    assert {each["state"].split()[-1] for each in workers} == {"ready"}
    hits = [each["hit rate"] for each in workers if each["pool"] == "prefill"]
    assert "–" in hits
    assert max(int(each["blocks"].split()[0]) for each in workers) > 0
    await tab.screenshot("console-fleet")
    await tab.screenshot("console-fleet-dark", dark=True)

    await tab.open(f"http://{product.address}/console/#/playground")
    await tab.until("document.querySelector('.playground option')")
    await tab.type("textarea[aria-label=Prompt]", "Tell me of Kvasir.\n")
    await tab.until("document.querySelector('.timing')?.innerText.includes('finish')")
    timing = await tab.until("document.querySelector('.timing').innerText")
    assert "length" in timing
    assert "256" in timing
    await tab.screenshot("console-playground")

    await tab.open(f"http://{product.address}/console/#/tenants")
    (tenant,) = await rows(tab, "Tenants")
    assert (tenant["tenant"], tenant["requests"]) == ("default", "4")
    assert int(tenant["output tokens"]) == 3 * 8 + 256
    await tab.screenshot("console-tenants")

    assert all(address.startswith(f"http://{product.address}/") for address in tab.asked), tab.asked


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
