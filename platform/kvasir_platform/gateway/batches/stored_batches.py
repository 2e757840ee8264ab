"""The batches of tenants in storage.

A batch is written by the process that works on it only. A wish to cancel it is therefore an object of its
own, and so is the mark of a batch that has not ended, by which processes find their work.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from kvasir.config.spec.edge import BatchesSpec
from kvasir.core.errors import CapacityError
from kvasir.ports.storage import ObjectStorage
from kvasir_platform.gateway.batches.names import ListQuery, batch_id, created_s, no_batch
from kvasir_platform.gateway.batches.schema import (
    ENDPOINTS,
    FINAL,
    BatchCounts,
    BatchList,
    BatchObject,
    BatchUsage,
    CreateBatchBody,
)
from kvasir_platform.gateway.batches.windows import window_s
from kvasir_platform.gateway.openai.schema.decode import decode_served
from kvasir_platform.gateway.openai.schema.limits import bad

OPEN = "open"
_MARK = re.compile(r"(.+)\.(batch_[0-9a-f]{24})")
_BATCH = msgspec.json.Decoder(BatchObject)
_BODY = msgspec.json.Decoder(CreateBatchBody)


def decode_create(body: bytes) -> CreateBatchBody:
    """Decode a request to create a batch. Raise RequestError."""
    asked = decode_served(_BODY, body)
    if asked.endpoint not in ENDPOINTS:
        raise bad(f"endpoint is one of {', '.join(ENDPOINTS)}.", "endpoint")
    return asked


class StoredBatches:
    """Batches by tenant and id. `wall` is Unix time in seconds. Methods block, and raise RequestError, or
    CapacityError if the storage fails."""

    def __init__(self, storage: ObjectStorage, spec: BatchesSpec, wall: Callable[[], float]) -> None:
        self._storage = storage
        self._spec = spec
        self._wall = wall

    def create(self, tenant: str, name: str, asked: CreateBatchBody) -> BatchObject:
        """Store a new batch. Raise RequestError for a window that is too long, CapacityError for too many."""
        lasts_s = self._lasts_s(asked.completion_window)
        if sum(of == tenant for of, _ in self.open()) >= self._spec.max_batches:
            raise CapacityError(
                f"You have {self._spec.max_batches} batches that have not ended, which is your limit.",
                code="batch_limit",
                retry_after_s=60.0,
            )
        now = int(self._wall())
        made = BatchObject(
            id=name,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + lasts_s,
            request_counts=BatchCounts(),
            usage=BatchUsage.none(),
            metadata=asked.metadata,
        )
        # The mark first: a batch without one would never be worked on.
        self._storage.put(f"{OPEN}/{tenant}.{name}", [b""])
        self.write(tenant, made)
        return made

    def open(self) -> list[tuple[str, str]]:
        """Return tenant and id of all batches that have not ended, the oldest first."""
        marks = filter(None, map(_MARK.fullmatch, self._storage.names(OPEN)))
        return sorted(((mark[1], mark[2]) for mark in marks), key=lambda each: each[1])

    def read(self, tenant: str, name: str) -> BatchObject | None:
        """Return a batch as its process last wrote it, None if there is none."""
        found = self._storage.get(f"{tenant}/batches/{batch_id(name)}")
        return None if found is None else _BATCH.decode(found)

    def write(self, tenant: str, batch: BatchObject) -> None:
        """Store the state of a batch."""
        self._storage.put(f"{tenant}/batches/{batch.id}", [msgspec.json.encode(batch)])

    def close(self, tenant: str, name: str) -> None:
        """Remove the marks of a batch that has ended."""
        self._storage.remove(f"{tenant}/cancelled/{name}")
        self._storage.remove(f"{OPEN}/{tenant}.{name}")

    def show(self, tenant: str, name: str) -> BatchObject:
        """Return a batch as its tenant sees it. Raise RequestError 404."""
        found = self.read(tenant, name)
        if found is None:
            raise no_batch(name)
        if found.status not in FINAL and (since := self.cancelled_at(tenant, name)) is not None:
            found.status, found.cancelling_at = "cancelling", since
        return found

    def cancel(self, tenant: str, name: str) -> BatchObject:
        """Ask for the end of a batch; one that has ended stays as it is. Raise RequestError 404."""
        found = self.show(tenant, name)
        if found.status not in FINAL and found.cancelling_at is None:
            self._storage.put(f"{tenant}/cancelled/{name}", [b"%d" % int(self._wall())])
            found = self.show(tenant, name)
        return found

    def cancelled_at(self, tenant: str, name: str) -> int | None:
        """Return the Unix time at which a batch was cancelled, None if it was not."""
        found = self._storage.get(f"{tenant}/cancelled/{name}")
        return None if found is None else int(found)

    def uses(self, tenant: str, file: str) -> str | None:
        """Return a batch that has not ended and reads this file, None if there is none."""
        for of, name in self.open():
            if of == tenant and (found := self.read(of, name)) is not None and found.input_file_id == file:
                return name
        return None

    def page(self, tenant: str, query: bytes) -> BatchList:
        """Return the batches that a query asks for."""
        page = ListQuery(query, batch_id, default=20, most=100)
        shown, more = page.of(self._storage.names(f"{tenant}/batches"))
        data = [self.show(tenant, name) for name in shown]
        first, last = (shown[0], shown[-1]) if shown else (None, None)
        return BatchList("list", data, first, last, more)

    def expire(self, tenant: str) -> None:
        """Remove the batches that ended too long ago."""
        oldest = int(self._wall() - self._spec.retention_s)
        for name in self._storage.names(f"{tenant}/batches"):
            if created_s(name) >= oldest:
                return
            found = self.read(tenant, name)
            if found is not None and found.status in FINAL:
                self._storage.remove(f"{tenant}/batches/{name}")

    def _lasts_s(self, window: str) -> int:
        seconds = window_s(window)
        if seconds is None or seconds > self._spec.retention_s:
            raise bad(
                f"completion_window is a whole number and m, h or d, as in 24h, up to "
                f"{int(self._spec.retention_s // 3600)}h.",
                "completion_window",
            )
        return seconds
