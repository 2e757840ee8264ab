"""What tests read in a view of the web console, and do with it."""

from __future__ import annotations

import json

from tests.kit.browser.tab import WIDTH, Tab

_MOST_TABS = 100
_ROWS = """((label) => {
  const table = document.querySelector(`[aria-label="${label}"] table`);
  if (!table?.tBodies[0]?.rows.length) return null;
  const names = [...table.tHead.rows[0].cells].map((each) => each.innerText.replace(/ [↓↑]$/, ""));
  return [...table.tBodies[0].rows].map((row) =>
    Object.fromEntries([...row.cells].map((cell, i) => [names[i], cell.innerText])));
})"""
_PICK = """((part, name, value) => {
  const labels = part?.querySelectorAll("label") ?? [];
  const select = [...labels].find((each) => each.innerText.startsWith(name))?.querySelector("select");
  if (![...(select?.options ?? [])].some((each) => each.value === value)) return false;
  select.value = value;
  select.dispatchEvent(new Event("change", { bubbles: true }));
  return true;
})"""
_FIGURE = """((name) => [...document.querySelectorAll(".figure")]
  .find((each) => each.querySelector(".name").textContent === name))"""


async def rows(tab: Tab, label: str) -> list[dict[str, str]]:
    """The rows of a table, once it has any, by the names of its columns."""
    return list(await tab.until(f"{_ROWS}({json.dumps(label)})"))


async def pick(tab: Tab, side: int, name: str, value: str) -> None:
    """Choose an option of one side of the playground, once it is there."""
    part = f"document.querySelectorAll('.playground fieldset')[{side}]"
    await tab.until(f"{_PICK}({part}, {json.dumps(name)}, {json.dumps(value)})")


async def choose(tab: Tab, name: str, value: str) -> None:
    """Choose an option of the list that is labelled with a name, once it is there."""
    await tab.until(f"{_PICK}(document, {json.dumps(name)}, {json.dumps(value)})")


async def pictured(tab: Tab, view: str) -> None:
    """Keep pictures of a view in both themes. Raise AssertionError if it is wider than the window."""
    await tab.screenshot(f"console-{view}-dark", dark=True)
    await tab.screenshot(f"console-{view}")
    wide = await tab.until("document.documentElement.scrollWidth")
    assert wide <= WIDTH, f"{view} is {wide} pixels wide"


async def figure(tab: Tab, name: str, note: str) -> str:
    """The value of a figure, once its note is this one."""
    found = f"{_FIGURE}({json.dumps(name)})"
    noted = f"{found}?.querySelector('.note').textContent === {json.dumps(note)}"
    return str(await tab.until(f"{noted} && {found}.querySelector('.value').textContent"))


def lines_of(name: str) -> str:
    """An expression for the number of lines that are drawn of a figure."""
    return f"{_FIGURE}({json.dumps(name)}).querySelectorAll('polyline').length"


async def tab_to(tab: Tab, element: str) -> None:
    """Press the Tab key until a selector matches the element with the focus. Raise AssertionError if it never
    does."""
    for _ in range(_MOST_TABS):
        await tab.press("Tab")
        if await tab.until(f"String(document.activeElement.matches({json.dumps(element)}))") == "true":
            return
    raise AssertionError(f"the Tab key never reaches {element}")
