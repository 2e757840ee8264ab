"""The shared tier: blocks in a Redis that all workers read and write, used while it answers quickly.

A server that is down, hangs, loads, is full or was emptied is a miss. A call for a request waits for at most
one deadline before the tier is disabled; `maintain` finds out whether the server is available again, and fast
enough. Its contents change without this worker (other workers write, the server evicts), so `held` has the
blocks that this instance has stored or found, rechecked when idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvasir.config.spec.tiers import RedisTierSpec
from kvasir.core.kv import Medium
from kvasir.ports.clock import Rng
from kvasir.ports.tier import TierChange, TierRead, TierWrite
from kvasir_workers.tiers.blob import HEADER_BYTES, read_header, verify_payload
from kvasir_workers.tiers.blobs.blob_tier import BlobTier
from kvasir_workers.tiers.blobs.redis_link import (
    LinkError,
    RedisConnection,
    RedisLink,
    RedisRefusal,
    Reply,
    command,
    set_command,
)
from kvasir_workers.tiers.breaker import BreakerLimits

MOST_BLOCKS = 1 << 18
"""Bounded so that a router's index has room for the blocks of many workers."""
_MOST_KEYS = 4096
_CHUNK_KEYS = 64
_RECHECKED_KEYS = 256
_WINDOW_BYTES = 8 << 20


class RedisTier(BlobTier):
    """See `kvasir.ports.tier.KvTier` and BlobTier. Changes cover at most the `most_blocks` most recently used
    blocks, including blocks that another worker stored, once this one has found them."""

    def __init__(
        self,
        spec: RedisTierSpec,
        fingerprint: bytes,
        block_bytes: int,
        *,
        now: Callable[[], float] = time.monotonic,
        rng: Rng | None = None,
        limits: BreakerLimits | None = None,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        super().__init__(
            Medium.REMOTE,
            f"the Redis tier at {spec.url}",
            fingerprint,
            block_bytes,
            footprint=HEADER_BYTES + block_bytes,
            capacity=0,
            most_blocks=most_blocks,
            now=now,
            rng=rng,
            limits=limits,
        )
        self._spec = spec
        self._prefix = f"{spec.namespace}:{fingerprint.hex()}:".encode()
        self._ttl = b"%d" % spec.ttl_s
        self._window = max(1, _WINDOW_BYTES // self._blob_bytes)
        self._recheck: list[bytes] = []
        self._link = RedisLink(spec, now)
        if self._blob_bytes > spec.max_value_bytes:
            self._writes.failed(self._too_large(), at_once=True)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """See KvTier. Checks the first 4,096 keys."""
        if self._closed or not self._reads.usable or not keys:
            return 0
        try:
            line = self._link.take(1, self._now() + self._spec.lookup_timeout_s)[0]
            found = self._leading(line, keys[:_MOST_KEYS])
        except LinkError as error:
            self._failed(error, at_once=error.timed_out)
            return 0
        self._reads.succeeded()
        return found

    def get(self, wanted: Sequence[TierRead]) -> int:
        """See KvTier."""
        if self._closed or not self._reads.usable or not wanted:
            return 0
        began = self._now()
        loaded: list[TierRead] = []
        try:
            self._fetch(self._link.take(1, began + self._spec.timeout_s), wanted, loaded)
        except LinkError as error:
            # A server that is too slow for the whole read, but sent some of it, does not hang.
            self._failed(error, at_once=error.timed_out and not loaded)
        else:
            self._reads.succeeded()
        if loaded:
            self._tally.loaded(len(loaded), self._now() - began)
        return len(loaded)

    def put(self, blocks: Sequence[TierWrite]) -> TierChange:
        """See KvTier."""
        if not self._closed and self._reads.usable and self._writes.usable and blocks:
            try:
                self._store(blocks, self._now() + self._spec.timeout_s)
            except LinkError as error:
                self._failed(error, at_once=error.timed_out)
        self._count_dropped(blocks)
        return self._held.take()

    def drop(self, keys: Sequence[bytes]) -> TierChange:
        """See KvTier. Applies to all workers."""
        if not self._closed and self._reads.usable:
            try:
                line = self._link.take(1, self._now() + self._spec.timeout_s)[0]
                for at in range(0, len(keys), _CHUNK_KEYS):
                    self._unlink(line, keys[at : at + _CHUNK_KEYS])
            except LinkError as error:
                self._failed(error, at_once=error.timed_out)
        for key in keys:
            self._held.remove(key)
        return self._held.take()

    def maintain(self) -> TierChange:
        """See KvTier."""
        if not self._closed:
            try:
                self._try(self._now() + self._spec.timeout_s)
            except LinkError as error:
                self._failed(error, at_once=error.timed_out)
        return self._held.take()

    @property
    def maintenance_pending(self) -> bool:
        """See KvTier."""
        return False

    def close(self) -> None:
        """See KvTier."""
        self._closed = True
        self._link.hang_up()

    # -- reading -----------------------------------------------------------------------------------

    def _leading(self, line: RedisConnection, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys exist: first by chunks, then within the first incomplete
        chunk."""
        chunks = [keys[at : at + _CHUNK_KEYS] for at in range(0, len(keys), _CHUNK_KEYS)]
        line.send([b"".join(command(b"EXISTS", *map(self._name, chunk)) for chunk in chunks)])
        whole = [_number(line.receive()) == len(chunk) for chunk in chunks]
        if all(whole):
            return len(keys)
        first = whole.index(False)
        there = self._exist(line, chunks[first])
        return first * _CHUNK_KEYS + (there.index(False) if False in there else len(there))

    def _exist(self, line: RedisConnection, keys: Sequence[bytes]) -> list[bool]:
        line.send([b"".join(command(b"EXISTS", self._name(key)) for key in keys)])
        there = [bool(_number(line.receive())) for _ in keys]
        for key, exists in zip(keys, there, strict=True):
            if not exists:
                self._held.remove(key)
        return there

    def _fetch(
        self, lines: Sequence[RedisConnection], wanted: Sequence[TierRead], loaded: list[TierRead]
    ) -> None:
        """Read over all connections in turn, with a bounded number of outstanding replies, until a blob is
        invalid; the outstanding replies are then read and dropped."""
        sent = 0
        window = max(self._window, len(lines))
        refused: list[bytes] = []
        for at, read in enumerate(wanted):
            if len(loaded) == at and sent - at <= window // 2:
                asked = range(sent, min(len(wanted), at + window))
                for number, line in enumerate(lines):
                    mine = (self._ask(wanted[k].key) for k in asked if k % len(lines) == number)
                    line.send([b"".join(mine)])
                sent = asked.stop
            if at == sent:
                break
            line = lines[at % len(lines)]
            value = line.receive()
            touched = line.receive()
            if not isinstance(touched, int | RedisRefusal):
                raise _unexpected(touched)
            if len(loaded) == at:
                reason = self._take(read, value)
                if reason is None:
                    loaded.append(read)
                elif reason:
                    refused.append(read.key)
                    self._refuse(reason, self._name(read.key).decode())
        if refused:
            self._unlink(lines[0], refused)

    def _ask(self, key: bytes) -> bytes:
        """Return commands that read a value and renew its time to live. The read is one byte longer than a
        blob, which detects longer values and bounds the reply."""
        name = self._name(key)
        return command(b"GETRANGE", name, b"0", b"%d" % self._blob_bytes) + command(
            b"EXPIRE", name, self._ttl
        )

    def _take(self, read: TierRead, value: Reply) -> str | None:
        """Copy the block into its target and return None; else return why it is invalid, "" if it does not
        exist."""
        if isinstance(value, RedisRefusal) and value.code == "WRONGTYPE":
            return "type"
        if not isinstance(value, bytes):
            raise _unexpected(value)
        if not value:
            self._held.remove(read.key)
            return ""
        reason = self._judge(read.key, value, len(value))
        if reason is None:
            read.target[:] = memoryview(value)[HEADER_BYTES:]
            header = read_header(value)
            reason = verify_payload(header, read.target)
            if reason is None:
                self._held.add(header.block)
        return reason

    # -- writing -----------------------------------------------------------------------------------

    def _store(self, blocks: Sequence[TierWrite], deadline: float) -> None:
        lines = self._link.take(self._spec.connections, deadline)
        missing = self._touch(lines[0], blocks)
        if missing is None:
            return
        for at in range(0, len(missing), self._window):
            began = self._now()
            if not self._write(lines, missing[at : at + self._window]):
                return
            ended = self._now()
            if ended + (ended - began) > deadline:
                break
        self._reads.succeeded()
        self._writes.succeeded()

    def _touch(self, line: RedisConnection, blocks: Sequence[TierWrite]) -> list[TierWrite] | None:
        """Renew the time to live of existing blocks. Return the missing ones, or None if the server accepts
        no writes."""
        missing = []
        refusal = None
        for at in range(0, len(blocks), _CHUNK_KEYS):
            chunk = blocks[at : at + _CHUNK_KEYS]
            line.send([b"".join(command(b"EXPIRE", self._name(w.block.key), self._ttl) for w in chunk)])
            for write in chunk:
                reply = line.receive()
                if isinstance(reply, RedisRefusal):
                    refusal = reply
                elif _number(reply):
                    self._held.add(write.block)
                else:
                    self._held.remove(write.block.key)
                    missing.append(write)
        if refusal is None:
            return missing
        self._refuse_writes(refusal)
        return None

    def _write(self, lines: Sequence[RedisConnection], batch: Sequence[TierWrite]) -> bool:
        """Write a batch. Return False if the server accepts no more."""
        refusal = None
        for at, write in enumerate(batch):
            name, header = self._name(write.block.key), self._header(write)
            lines[at % len(lines)].send(set_command(name, header, write.data, self._spec.ttl_s))
        for at, write in enumerate(batch):
            reply = lines[at % len(lines)].receive()
            if isinstance(reply, RedisRefusal):
                refusal = reply
            elif reply != b"OK":
                raise _unexpected(reply)
            else:
                self._held.add(write.block)
                self._tally.stored(1)
        if refusal is not None:
            self._refuse_writes(refusal)
        return refusal is None

    def _unlink(self, line: RedisConnection, keys: Sequence[bytes]) -> None:
        if keys:
            line.send([command(b"UNLINK", *map(self._name, keys))])
            reply = line.receive()
            if isinstance(reply, RedisRefusal):
                self._refuse_writes(reply)
        for key in keys:
            self._held.remove(key)

    # -- health ------------------------------------------------------------------------------------

    def _try(self, deadline: float) -> None:
        """Keep the connections open, try what is disabled, and recheck blocks believed to exist."""
        trial = self._reads.due()
        if not trial and not self._reads.usable:
            return
        lines = self._link.take(self._spec.connections, deadline)
        if trial:
            self._try_answers(lines[0], deadline)
        if self._writes.due():
            self._try_writing(lines[0])
        self._recheck = self._recheck or self._held.keys()
        keys = [self._recheck.pop() for _ in range(min(_RECHECKED_KEYS, len(self._recheck)))]
        if keys:
            self._exist(lines[0], keys)

    def _try_answers(self, line: RedisConnection, deadline: float) -> None:
        """Send one lookup and one block read, each within its timeout."""
        name = self._name(self._held.newest() or self._fingerprint)
        line.until(min(self._now() + self._spec.lookup_timeout_s, deadline))
        line.send([command(b"EXISTS", name)])
        _number(line.receive())
        line.until(deadline)
        line.send([command(b"GETRANGE", name, b"0", b"%d" % self._blob_bytes)])
        line.receive()
        self._reads.succeeded()

    def _try_writing(self, line: RedisConnection) -> None:
        if self._blob_bytes > self._spec.max_value_bytes:
            self._writes.failed(self._too_large(), at_once=True)
            return
        line.send([command(b"SET", self._prefix + b"trial", b"", b"EX", b"1")])
        reply = line.receive()
        if isinstance(reply, RedisRefusal):
            self._refuse_writes(reply)
        else:
            self._writes.succeeded()

    def _failed(self, error: LinkError, *, at_once: bool) -> None:
        self._link.hang_up()
        self._tally.add(failures=1)
        self._reads.failed(error.trouble, at_once=at_once)

    def _refuse_writes(self, refusal: RedisRefusal) -> None:
        if refusal.moved:
            raise _unexpected(refusal)
        self._tally.add(failures=1)
        self._writes.failed(refusal.trouble, at_once=True)

    def _too_large(self) -> str:
        return f"a block has {self._blob_bytes} bytes: raise tiers.redis.max_value_bytes"

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()


def _unexpected(reply: Reply) -> LinkError:
    if isinstance(reply, RedisRefusal):
        return LinkError(reply.trouble)
    return LinkError(f"unexpected reply of type {type(reply).__name__}: check its url")


def _number(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise _unexpected(reply)
    return reply
