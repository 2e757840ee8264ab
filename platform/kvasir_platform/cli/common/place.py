"""How tables of workers show where each runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = tuple[str, ...]


def with_places(head: Row, rows: Sequence[Row], workers: Sequence[dict[str, Any]]) -> tuple[Row, list[Row]]:
    """Return a table of workers, of /status, with a column PLACE before its last one, unless no place is
    known."""
    places = [_place(worker.get("locality") or {}) for worker in workers]
    if not any(places):
        return head, list(rows)
    more = [(*row[:-1], place or "-", row[-1]) for row, place in zip(rows, places, strict=True)]
    return (*head[:-1], "PLACE", head[-1]), more


def _place(locality: dict[str, Any]) -> str:
    """Return zone, rack, node and NVLink domain, as far as they are known."""
    parts = [locality.get(name) or "" for name in ("zone", "rack", "node")]
    if domain := locality.get("nvlink_domain"):
        parts.append(f"NVLink {domain}")
    return "/".join(part for part in parts if part)
