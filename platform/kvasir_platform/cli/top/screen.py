"""The screen of `kvasir top`: the only module that imports Textual. What it shows is made by `tables`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from kvasir.core.errors import KvasirError
from kvasir_platform.cli.top.snapshot import TopSnapshot
from kvasir_platform.cli.top.tables import TABLES, TopOrder, TopTable, arranged, fitted, heading

_MARGIN = 2
_CELL_PADDING = 1
_LEAST_ALSO = 3
_LINES_FOR_ALSO = 4
"""A terminal shows one further problem for so many of its lines, as the table needs the others."""


@dataclass(frozen=True, slots=True)
class _PlainText:
    """A cell. Of a str, the grid would take what stands in brackets for markup."""

    text: str

    def __str__(self) -> str:
        return self.text


class TopScreen(App[None]):
    """Shows `first`, and what `read` returns every `interval_s` seconds; `read` runs in a thread."""

    CSS = """
    Static { height: 1; padding: 0 1; }
    #verdict { text-style: bold; height: auto; max-height: 6; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "view(0)", "View", key_display=f"1-{len(TABLES)}"),
        *(Binding(str(i), f"view({i - 1})", show=False) for i in range(2, len(TABLES) + 1)),
        Binding("tab", "next_view", "Next", priority=True),
        ("s", "sort", "Sort"),
        ("r", "reverse", "Order"),
        ("slash", "filter", "Filter"),
        ("p", "pause", "Pause"),
        Binding("escape", "end_filter", "End filter", show=False),
        ("q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        read: Callable[[], TopSnapshot],
        first: TopSnapshot,
        *,
        view: str = "workers",
        order: TopOrder | None = None,
        interval_s: float = 1.0,
    ) -> None:
        super().__init__()
        self._read = read
        self._interval_s = interval_s
        self._view = next(i for i, make in enumerate(TABLES) if make.__name__ == view)
        self._order = TopOrder() if order is None else order
        self._before: TopSnapshot | None = None
        self._now = first
        self._trouble = ""
        self._paused = False
        self._laid_out = False

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="verdict", markup=False)
        yield Static(id="figures", markup=False)
        yield Static(id="title", markup=False)
        yield DataTable(id="rows", cursor_type="row", cell_padding=_CELL_PADDING)
        yield Input(placeholder="filter: text in any cell; Enter keeps it, Esc ends it", id="filter")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to refresh."""
        self._laid_out = True
        self.query_one(DataTable).focus()
        self._draw()
        self.set_interval(self._interval_s, self.refresh_now)

    def on_resize(self) -> None:
        """Fit the columns to the new width."""
        self._draw()

    @work(thread=True, exclusive=True, group="read")
    def refresh_now(self) -> None:
        """Read a snapshot and show it, unless paused."""
        if self._paused:
            return
        try:
            snapshot: TopSnapshot | None = self._read()
            trouble = ""
        except KvasirError as error:
            snapshot, trouble = None, error.message
        # The user may have quit meanwhile.
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self.take, snapshot, trouble)

    def take(self, snapshot: TopSnapshot | None, trouble: str) -> None:
        """Show a snapshot; None: keep the last one, and say why."""
        if self._paused:
            return
        if snapshot is not None:
            self._before, self._now = self._now, snapshot
        self._trouble = trouble
        self._draw()

    def action_view(self, index: int) -> None:
        """Show another view."""
        self._view = index
        self._draw()

    def action_next_view(self) -> None:
        """Show the view after this one."""
        self.action_view((self._view + 1) % len(TABLES))

    def action_sort(self) -> None:
        """Sort by the column after this one."""
        table = self._table()
        shown = table.columns.index(self._column(table))
        self._order = replace(
            self._order, column=table.columns[(shown + 1) % len(table.columns)], reverse=False
        )
        self._draw()

    def action_reverse(self) -> None:
        """Sort in the other order."""
        self._order = replace(self._order, reverse=not self._order.reverse)
        self._draw()

    def action_filter(self) -> None:
        """Ask for a text that rows must have."""
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def action_end_filter(self) -> None:
        """Show all rows again."""
        self.query_one(Input).value = ""
        self._close_filter()

    def action_pause(self) -> None:
        """Stop or go on refreshing."""
        self._paused = not self._paused
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the text is written."""
        self._order = replace(self._order, text=event.value)
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one(Input).display = False
        self.query_one(DataTable).focus()

    def _table(self) -> TopTable:
        return TABLES[self._view](self._now, self._before)

    def _column(self, table: TopTable) -> str:
        return self._order.column if self._order.column in table.columns else table.order

    def _draw(self) -> None:
        if not self._laid_out:
            return
        table = self._table()
        verdict, figures = heading(self._now, max(_LEAST_ALSO, self.size.height // _LINES_FOR_ALSO))
        self.query_one("#verdict", Static).update(f"STALE: {self._trouble}" if self._trouble else verdict)
        self.query_one("#figures", Static).update(figures)
        rows = arranged(table, self._order)
        self.query_one("#title", Static).update(self._title(table, len(rows)))
        grid: DataTable[_PlainText] = self.query_one(DataTable)
        heads, cells = fitted(table, rows, self.size.width - _MARGIN)
        at = grid.cursor_row
        grid.clear(columns=True)
        grid.add_columns(*heads)
        grid.add_rows([[_PlainText(cell) for cell in row] for row in cells])
        grid.move_cursor(row=min(at, max(0, len(cells) - 1)), animate=False)

    def _title(self, table: TopTable, count: int) -> str:
        parts = [f"{table.title} ({count})", f"by {self._column(table)}"]
        parts += ["other order"] if self._order.reverse else []
        parts += [f"with {self._order.text!r}"] if self._order.text else []
        parts += ["PAUSED"] if self._paused else []
        return ", ".join(parts)
