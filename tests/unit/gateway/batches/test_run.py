"""One batch at work: expiry, lost leases, storage that fails, and a process that stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from obstore.store import MemoryStore
from tests.kit.skipping_clock import SkippingClock

from kvasir.config.spec.edge import BatchesSpec
from kvasir.core.errors import CapacityError
from kvasir.telemetry.tenant_series import BatchStats
from kvasir_platform.gateway.batches.context import BatchContext
from kvasir_platform.gateway.batches.line_exchange import LineExchange
from kvasir_platform.gateway.batches.pace import LinePace
from kvasir_platform.gateway.batches.run import BatchRun
from kvasir_platform.gateway.batches.runner import BatchRunner
from kvasir_platform.gateway.batches.schema import BatchObject, CreateBatchBody
from kvasir_platform.gateway.batches.storage.local_storage import FileLease, LocalStorage
from kvasir_platform.gateway.batches.storage.s3_storage import S3Storage
from kvasir_platform.gateway.batches.stored_batches import StoredBatches
from kvasir_platform.gateway.batches.stored_files import StoredFiles
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.tenants.caller import Caller

NAME, FILE, PATH = "batch_" + "0" * 24, "file-" + "0" * 24, "/v1/completions"
T = TypeVar("T")


class FailingStorage(LocalStorage):
    """Fails the next `failures` times that a result is stored, and `unremoved` times that one is removed."""

    failures = 0
    unremoved = 0

    def put(self, key: str, pieces: Any) -> None:
        if "/journals/" in key and self.failures:
            self.failures -= 1
            raise CapacityError("full", code="storage_unavailable")
        super().put(key, pieces)

    def remove(self, key: str) -> None:
        if "/journals/" in key and self.unremoved:
            self.unremoved -= 1
            raise CapacityError("away", code="storage_unavailable")
        super().remove(key)


class LosableLease(FileLease):
    """Is lost when `lost` is set; was `taken` so many times; fails the next `unreleased` times that it
    is given back."""

    lost = False
    taken = 0
    unreleased = 0

    def take(self, name: str) -> int | None:
        self.taken += 1
        return super().take(name)

    def release(self, name: str, *, done: bool) -> None:
        super().release(name, done=done)
        if self.unreleased:
            self.unreleased -= 1
            raise CapacityError("away", code="storage_unavailable")

    def keep(self, name: str) -> bool:
        return not self.lost and super().keep(name)


class StoppedClock:
    """A clock whose sleeps do not end."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


@dataclass
class Bench:
    """A batch of five lines in a folder, whose lines `handle` gets."""

    folder: Path
    handle: Callable[[LineExchange], None] = lambda exchange: exchange.respond(200, b'{"usage": null}')
    now_s: float = 1e9
    exchanges: list[LineExchange] = field(default_factory=list)
    stats: BatchStats = field(default_factory=BatchStats)
    storage: FailingStorage = field(init=False)
    lease: LosableLease = field(init=False)
    batches: StoredBatches = field(init=False)
    files: StoredFiles = field(init=False)

    def __post_init__(self) -> None:
        self.lease = LosableLease(self.folder / "leases")
        self.move(FailingStorage(self.folder))

    def move(self, storage: Any) -> None:
        """Keep file and batch in this storage."""
        self.storage = storage
        self.batches = StoredBatches(self.storage, BatchesSpec(), lambda: self.now_s)
        self.files = StoredFiles(self.storage, BatchesSpec(), lambda: self.now_s)
        body = {"model": "m", "prompt": "x"}
        rows = [{"custom_id": f"c{i}", "method": "POST", "url": PATH, "body": body} for i in range(5)]
        content = "\n".join(map(json.dumps, rows)).encode()
        self.files.put("t", FILE, "lines.jsonl", "batch", [content])
        asked = CreateBatchBody(input_file_id=FILE, endpoint=PATH, completion_window="1h")
        self.batches.create("t", NAME, asked)

    def run(self, lines: int = 1) -> BatchRun:
        """One more process that takes the work, `lines` at a time."""
        token = self.lease.take(NAME)
        assert token is not None
        return BatchRun(self.context(), "t", NAME, token, LinePace(lambda: lines))

    def context(self) -> BatchContext:
        """What a process works with."""

        def took(_: Caller, exchange: Exchange) -> None:
            line = cast("LineExchange", exchange)
            self.exchanges.append(line)
            self.handle(line)

        def later(step: Callable[[], T]) -> Awaitable[T]:
            return asyncio.get_running_loop().run_in_executor(None, step)

        return BatchContext(
            BatchesSpec(),
            1 << 20,
            self.storage,
            self.lease,
            self.files,
            self.batches,
            {PATH: took},
            lambda _: cast("Caller", None),
            lambda exchange, error: exchange.fail(cast("Exception", error)),
            later,
            later,
            lambda: f"{len(self.exchanges):024x}",
            SkippingClock(),
            lambda: self.now_s,
            self.stats,
        )

    def shown(self) -> BatchObject:
        return self.batches.show("t", NAME)

    def rows(self, file: str | None) -> list[dict[str, Any]]:
        assert file is not None
        return [json.loads(row) for row in self.files.content("t", file).splitlines()]


async def test_a_batch_that_expires_keeps_its_results_and_names_the_lines_that_did_not_run(
    tmp_path: Path,
) -> None:
    def handle(exchange: LineExchange) -> None:
        if exchange.number == 2:
            bench.now_s += 3601
            run.look()
        asyncio.get_running_loop().call_later(0.05, exchange.respond, 200, b"{}")

    bench = Bench(tmp_path, handle)
    run = bench.run()
    assert await run.run()
    shown = bench.shown()
    assert (shown.status, shown.expired_at) == ("expired", int(bench.now_s))
    assert [row["custom_id"] for row in bench.rows(shown.output_file_id)] == ["c0", "c1", "c2"]
    left = bench.rows(shown.error_file_id)
    assert [(row["custom_id"], row["error"]["code"]) for row in left] == [
        ("c3", "batch_expired"),
        ("c4", "batch_expired"),
    ]
    assert bench.batches.open() == []


async def test_a_process_that_lost_its_lease_ends_its_lines_and_stores_nothing_of_them(
    tmp_path: Path,
) -> None:
    gone: list[str] = []

    def on_gone(why: str) -> None:
        gone.append(why)
        bench.lease.lost = False
        bench.handle = Bench.handle

    def handle(exchange: LineExchange) -> None:
        exchange.on_gone = on_gone
        bench.lease.lost = True

    bench = Bench(tmp_path, handle)
    runner = BatchRunner(bench.context(), ("t",))
    serving = asyncio.create_task(runner.serve())
    while bench.shown().status != "completed":
        await asyncio.sleep(0)
    runner.stop()
    await serving
    lost = len(gone)
    assert gone == ["client_closed"] * lost
    assert bench.lease.taken == 2
    assert len(bench.exchanges) == lost + 5
    assert bench.shown().request_counts.completed == 5


async def test_no_file_is_made_of_a_journal_that_the_next_process_removes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    late = bench.run(5)
    finish = late._finish

    async def late_finish(end: Any) -> None:
        bench.lease.release(NAME, done=False)
        assert await bench.run().run()
        bench.lease.lost = True
        await finish(end)

    late._finish = late_finish  # type: ignore[method-assign] # as if it were frozen for a while
    with pytest.raises(CapacityError, match="is lost"):
        await late.run()
    assert len(bench.exchanges) == 5
    assert len(bench.rows(bench.shown().output_file_id)) == 5


class Killed(BaseException):
    """The process is killed."""


@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_a_process_that_is_killed_between_journal_and_output_repeats_no_line(
    tmp_path: Path, kind: str
) -> None:
    bench = Bench(tmp_path)
    objects = LocalStorage(tmp_path) if kind == "folder" else S3Storage(cast("Any", MemoryStore()), "bucket")
    bench.move(objects)
    put = objects.put

    def killed(key: str, pieces: Iterable[bytes]) -> None:
        if "/contents/" in key:
            list(pieces)
            raise Killed
        put(key, pieces)

    objects.put = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        await bench.run(5).run()
    assert bench.shown().status == "finalizing"
    objects.put = put  # type: ignore[method-assign]
    bench.lease.release(NAME, done=False)
    assert await bench.run(5).run()
    shown = bench.shown()
    assert (shown.status, len(bench.exchanges)) == ("completed", 5)
    assert sorted(row["custom_id"] for row in bench.rows(shown.output_file_id)) == [f"c{i}" for i in range(5)]
    assert objects.names(f"t/journals/{NAME}") == []


async def test_results_wait_for_a_storage_that_fails_for_a_while(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.storage.failures = 3
    assert await bench.run(5).run()
    shown = bench.shown()
    assert (shown.status, shown.request_counts.completed) == ("completed", 5)
    assert len(bench.exchanges) == 5
    assert (bench.stats.lines, bench.stats.lines_running) == ({"answered": 5}, 0)


async def test_a_process_that_stops_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    def handle(exchange: LineExchange) -> None:
        if exchange.number < 2:
            exchange.respond(200, b"{}")
        else:
            run.stop()
            run.abandon()

    bench = Bench(tmp_path, handle)
    run = bench.run()
    assert not await run.run()
    bench.lease.release(NAME, done=False)
    bench.handle = Bench.handle
    assert await bench.run().run()
    assert sorted(exchange.number for exchange in bench.exchanges) == [0, 1, 2, 2, 3, 4]
    assert bench.shown().request_counts.completed == 5


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_no_line_starts_of_a_batch_that_ended_while_nobody_worked_on_it(
    tmp_path: Path, end: str
) -> None:
    bench = Bench(tmp_path)
    if end == "cancelled":
        bench.batches.cancel("t", NAME)
    else:
        bench.now_s += 3601
    assert await bench.run(5).run()
    shown = bench.shown()
    assert (shown.status, bench.exchanges) == (end, [])
    assert {row["error"]["code"] for row in bench.rows(shown.error_file_id)} == {f"batch_{end}"}


async def test_a_batch_whose_file_is_gone_fails(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.files.remove("t", FILE)
    assert await bench.run().run()
    shown = bench.shown()
    assert shown.errors is not None
    assert (shown.status, shown.errors.data[0].code) == ("failed", "file_not_found")


async def test_a_crash_between_the_last_states_is_made_up_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert await bench.run().run()
    # As if the process had ended before it removed the mark.
    bench.storage.put(f"open/t.{NAME}", [b""])
    bench.lease.release(NAME, done=True)
    assert await bench.run().run()
    assert bench.batches.open() == []
    assert len(bench.exchanges) == 5


async def test_what_a_batch_leaves_is_removed_after_a_storage_that_failed_at_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.storage.unremoved = 1
    with pytest.raises(CapacityError):
        await bench.run().run()
    bench.lease.release(NAME, done=False)
    assert bench.shown().status == "completed"
    assert bench.batches.open() == [("t", NAME)]
    assert await bench.run().run()
    assert bench.storage.names(f"t/journals/{NAME}") == []
    assert bench.batches.open() == []


async def test_a_mark_without_a_batch_is_removed_after_a_while(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.storage.remove(f"t/batches/{NAME}")
    bench.now_s = 10.0
    assert not await bench.run().run()
    bench.lease.release(NAME, done=False)
    assert len(bench.batches.open()) == 1
    bench.now_s = 1000.0
    assert await bench.run().run()
    assert bench.batches.open() == []


async def test_a_batch_that_cannot_go_on_is_not_tried_at_once_again(tmp_path: Path, caplog: Any) -> None:
    bench = Bench(tmp_path)
    bench.storage.remove(f"t/batches/{NAME}")
    bench.now_s = 10.0
    bench.lease.unreleased = 1

    async def at_once(step: Callable[[], T]) -> T:
        return step()

    runner = BatchRunner(
        replace(bench.context(), later=at_once, lease_later=at_once, clock=StoppedClock()), ("t",)
    )
    serving = asyncio.create_task(runner.serve())
    for _ in range(100):
        await asyncio.sleep(0)
    assert bench.lease.taken == 1
    assert f"batch {NAME} waits: away" in caplog.text
    runner.stop()
    await serving


def test_what_is_too_old_is_removed_and_what_runs_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.now_s += BatchesSpec().retention_s + 1
    bench.files.expire("t")
    bench.batches.expire("t")
    assert bench.files.page("t", b"").data == []
    assert bench.shown().status == "validating"
