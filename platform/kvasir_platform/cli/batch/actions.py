"""`kvasir batch submit|list|watch|fetch|cancel`: batches of a running deployment."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvasir.core.errors import ConfigError, KvasirError, RequestError
from kvasir_platform.cli.batch.client import asked, download, upload
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, duration, number, size, table
from kvasir_platform.gateway.batches.schema import ENDPOINTS
from kvasir_platform.gateway.batches.windows import window_s

FINAL = frozenset(("completed", "failed", "expired", "cancelled"))
_POLL_S = 1.0
_LINE_S = 10.0
_WIDTH = 24
_HEAD = ("ID", "STATUS", "LINES", "DONE", "FAILED", "ENDPOINT", "AGE")
_NUMBERS = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class SubmitArguments:
    """The arguments of `kvasir batch submit`. `endpoint` None means that of the first line."""

    file: Path
    endpoint: str | None
    window: str
    watch: bool


def submit(wanted: SubmitArguments, site: Site, output: CommandOutput) -> int:
    """Upload a file and create a batch; the file is deleted again if the gateway refuses the batch. Raises
    ConfigError for an endpoint or window that no gateway takes, and the errors of the client."""
    endpoint = wanted.endpoint or _first_url(wanted.file)
    _check(endpoint, wanted.window)

    def shown(sent: int, total: int) -> None:
        if output.is_terminal:
            output.redraw(f"... {size(sent)} of {size(total)} uploaded")

    file = upload(site, wanted.file, shown)
    if output.is_terminal:
        output.redraw("")
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": wanted.window}
    try:
        batch = asked(site, "POST", "/v1/batches", body)
    except RequestError:
        with contextlib.suppress(KvasirError):
            asked(site, "DELETE", f"/v1/files/{quote(str(file['id']), safe='')}")
        raise
    name = str(batch["id"])
    if wanted.watch:
        output.text(f"{name} is submitted")
        return watch(name, site, output)
    output.data(batch)
    output.text(f"{name} is submitted; see how far it is with: kvasir batch watch {name}")
    return 0


def list_batches(limit: int, site: Site, output: CommandOutput, now: Callable[[], float] = time.time) -> int:
    """Print one line for each batch. Raises the errors of the client."""
    found = asked(site, "GET", f"/v1/batches?limit={limit}")["data"]
    output.data(found)
    if found:
        output.text(table(_HEAD, [_row(batch, now()) for batch in found], _NUMBERS))
    else:
        output.text("there is no batch; run one with: kvasir batch submit FILE")
    return 0


def watch(
    name: str,
    site: Site,
    output: CommandOutput,
    *,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Show how far a batch is until it has ended. Return 0 if it is completed. Raises the errors of the
    client."""
    began_s, printed_s, first = now(), 0.0, None
    while True:
        batch = asked(site, "GET", _path(name))
        done = _done(batch)
        if first is None:
            first = done
        line = _progress(batch, done - first, now() - began_s)
        if batch["status"] in FINAL:
            break
        if output.is_terminal:
            output.redraw(line[:110])
        elif now() - printed_s >= _LINE_S or not printed_s:
            output.text(f"... {line}")
            printed_s = now()
        pause(_POLL_S)
    if output.is_terminal:
        output.redraw("")
    output.data(batch)
    output.text(line)
    for error in ((batch.get("errors") or {}).get("data") or ())[:10]:
        where = "the file" if error["line"] is None else f"line {error['line']}"
        output.text(f"  {where}: {error['message']}")
    if batch.get("output_file_id") or batch.get("error_file_id"):
        output.text(f"fetch the results with: kvasir batch fetch {name}")
    return 0 if batch["status"] == "completed" else 1


def fetch(name: str, to: Path | None, site: Site, output: CommandOutput, *, force: bool) -> int:
    """Write the results of a batch that has ended. Raises ConfigError if it has none yet, and the errors of
    the client."""
    batch = asked(site, "GET", _path(name))
    answers = Path(f"{name}.jsonl") if to is None else to
    wanted = {
        "answers": (batch.get("output_file_id"), answers),
        "errors": (batch.get("error_file_id"), answers.with_name(f"{answers.name}.errors")),
    }
    written: dict[str, str] = {}
    for what, (file, path) in wanted.items():
        if file is not None:
            download(site, file, path, force=force)
            written[what] = str(path)
            output.text(f"{what} are in {path}")
    if not written:
        raise ConfigError(
            f"{name} has no results: it is {batch['status']}; wait with: kvasir batch watch {name}"
        )
    output.data(written)
    return 0


def cancel(name: str, site: Site, output: CommandOutput) -> int:
    """Cancel a batch. Raises the errors of the client."""
    batch = asked(site, "POST", f"{_path(name)}/cancel", {})
    output.data(batch)
    output.text(f"{name} is {batch['status']}; lines that run go on to their end")
    return 0


def _path(name: str) -> str:
    return f"/v1/batches/{quote(name, safe='')}"


def _check(endpoint: str, window: str) -> None:
    if window_s(window) is None:
        raise ConfigError(f"--window {window!r}: a whole number and m, h or d, as 90m, 24h or 7d")
    if endpoint not in ENDPOINTS:
        raise ConfigError(f"no batch calls {endpoint!r}; lines may call {', '.join(ENDPOINTS)}")


def _first_url(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of JSON lines: {error}") from error
    url = first.get("url") if isinstance(first, dict) else None
    if not isinstance(url, str):
        raise ConfigError(f"{path}: its first line has no url; name what the lines call with --endpoint")
    return url


def _done(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"]) + int(counts["failed"])


def _progress(batch: dict[str, Any], since: int, elapsed_s: float) -> str:
    """Return one line; `since` is the number of lines that ended in the seconds that are watched."""
    total, done = int(batch["request_counts"]["total"]), _done(batch)
    filled = round(done / total * _WIDTH) if total else 0
    parts = [f"{batch['status']} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done:,}/{total:,} lines"]
    if batch["request_counts"]["failed"]:
        parts.append(f"{batch['request_counts']['failed']:,} failed")
    if since and elapsed_s and batch["status"] == "in_progress":
        rate = since / elapsed_s
        parts.append(f"{rate:,.1f} a second, {duration((total - done) / rate)} left")
    return ", ".join(parts)


def _row(batch: dict[str, Any], now: float) -> tuple[str, ...]:
    counts = batch["request_counts"]
    return (
        str(batch["id"]),
        str(batch["status"]),
        number(counts["total"]),
        number(counts["completed"]),
        number(counts["failed"]),
        str(batch["endpoint"]),
        duration(max(0.0, now - float(batch["created_at"]))),
    )
