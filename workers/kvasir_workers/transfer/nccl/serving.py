"""The sender side: one thread for each peer that pulls, which sends it blocks.

A thread sends the complete blocks of its peer's pulls in turns, and waits for leases and blocks that are not
there yet. Blocks are read before the lease is checked, which makes the bytes valid: see leases.py.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, LeaseEnded
from kvasir_workers.transfer.common.checksums import BlockSums
from kvasir_workers.transfer.common.lease_keys import Refusals, lease_key, same
from kvasir_workers.transfer.common.leases import LeaseState, refusal
from kvasir_workers.transfer.common.memory import CopyBatch, Stretch
from kvasir_workers.transfer.common.pulls import part_bytes
from kvasir_workers.transfer.nccl.control import Control, Waker, request_proof
from kvasir_workers.transfer.nccl.group import NcclGroupLink
from kvasir_workers.transfer.nccl.leases import LeaseBook
from kvasir_workers.transfer.nccl.local import SLOTS, Local, batch_blocks, summed_blocks, tag
from kvasir_workers.transfer.nccl.meeting import GREETING_S, PeerRefusedError, meet_puller
from kvasir_workers.transfer.nccl.messages import (
    SUMS,
    Chunk,
    ChunkReceived,
    Confirm,
    End,
    Message,
    Opening,
    PullRequest,
    StorePut,
    Withdraw,
)

_log = logging.getLogger(__name__)

MAX_PEERS = 64
MAX_PULLS = 1024
BACKLOG = 64
IDLE_S = 300.0
WAITING_S = 1.0
JOIN_S = 0.05


class NcclSender:
    """Listens, and serves the blocks of its leases to peers that have their keys, which follow from
    `secret`, with `parts` checksums of each, computed by `sums`. Raise TransferError if it cannot listen."""

    def __init__(self, local: Local, secret: bytes, sums: BlockSums, parts: int) -> None:
        self._local = local
        self._secret = secret
        self._sums = sums
        self._parts = parts
        self._book = LeaseBook(local.now, parts)
        self._refusals = Refusals(local.now)
        host = local.host
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        except OSError as error:
            raise TransferError(f"cannot listen on {host}: {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._waker = Waker()
        self._lock = threading.Lock()
        self._peers: list[ServedPeer] = []
        self._thread = threading.Thread(target=self._accept_all, name="kv-nccl-listen", daemon=True)
        self._thread.start()

    def offer(self, lease_id: str, fence: int, blocks: Sequence[int], *, total: int, ttl_s: float) -> None:
        """Grant a lease on `total` blocks, of which `blocks` are complete. Raise TransferError if it is live,
        if there are too many leases, or for blocks outside the registered memory."""
        self._local.shape.require(blocks)
        self._book.grant(lease_id, fence, ttl_s, total)
        self.extend(lease_id, blocks)

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """Add complete blocks and restart the lease's deadline. Raise TransferError for blocks outside the
        registered memory."""
        self._local.shape.require(blocks)
        # In batches, so that the first is sent while the next is summed.
        sizes = self._local.shape.block_bytes
        step = summed_blocks(sum(sizes), len(sizes), self._local.device)
        for first in range(0, len(blocks), step):
            batch = blocks[first : first + step]
            sums = self._sums.begin(batch, self._parts)
            self._book.add(lease_id, batch, sums)
            sums.add_done_callback(lambda _: self._wake())

    def release(self, lease_id: str) -> None:
        """End a lease if it is live."""
        self._book.end(lease_id, "released")
        self._wake()

    def poll(self) -> list[LeaseEnded]:
        """Return the leases that ended since the last call."""
        ended = self._book.take_ended()
        if ended:
            self._wake()
        return ended

    def take_refused(self) -> int:
        """Return how many peers and pulls without a valid ticket were refused since the last call."""
        return self._refusals.take()

    def close(self) -> list[LeaseEnded]:
        """End every lease and disconnect every peer. When this returns, no thread reads KV memory. Returns
        the leases that ended since the last poll."""
        self._book.close()
        self._waker.stop()
        self._thread.join()
        self._waker.close()
        self._listener.close()
        for peer in self._peers:
            peer.stop()
        for peer in self._peers:
            peer.end()
        self._sums.close()
        return self._book.take_ended()

    def _wake(self) -> None:
        """Wake the threads that wait for leases."""
        with self._lock:
            for peer in self._peers:
                if peer.waits:
                    peer.wake()

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._waker, select.POLLIN)
        while True:
            poller.poll()
            if self._waker.stopped:
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    _log.warning("cannot accept a peer: %s", error)
                continue
            self._accept(connection)

    def _accept(self, connection: socket.socket) -> None:
        with self._lock:
            self._peers = [peer for peer in self._peers if peer.alive]
            idle = [peer for peer in self._peers if not peer.waits]
        if len(self._peers) >= MAX_PEERS:
            if not idle:
                _log.warning("rejected a peer: %d others are pulling", MAX_PEERS)
                connection.close()
                return
            # Whoever has not shown a ticket leaves first.
            longest = min(idle, key=lambda peer: (peer.met, peer.busy_s))
            longest.stop()
            longest.end()
        peer = ServedPeer(connection, self._local, self._secret, self._book, self._refusals)
        with self._lock:
            self._peers.append(peer)


class _Pull:
    """One pull of a peer. `opened` of its blocks were announced; `chunks` of the last batch are to be sent. A
    batch has at most `batch_blocks` blocks."""

    def __init__(self, request: PullRequest, most: int) -> None:
        self.request = request
        self.part = BlockPart(request.index, request.of)
        self.batch_blocks = most
        self.batch: CopyBatch | None = None
        self.chunks: deque[Stretch] = deque()
        self.opened = 0
        self.on_their_way = 0


class ServedPeer:
    """One connection and its thread."""

    def __init__(
        self, connection: socket.socket, local: Local, secret: bytes, book: LeaseBook, refusals: Refusals
    ) -> None:
        self._local = local
        self._secret = secret
        self._book = book
        self._refusals = refusals
        self._nonces = b""
        self._waker = Waker()
        self._control = Control(connection, self._waker, local.now)
        self._link: NcclGroupLink | None = None
        self._turns: OrderedDict[int, _Pull] = OrderedDict()
        self._unconfirmed: OrderedDict[int, PullRequest] = OrderedDict()
        self._staging: list[Any] = []
        self._sends: deque[tuple[_Pull, Any]] = deque()
        self._chunks = 0
        self.waits = False
        self.busy_s = local.now()
        self._thread = threading.Thread(target=self._run, name="kv-nccl-serve", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def met(self) -> bool:
        """Whether it has shown a ticket."""
        return self._link is not None

    def wake(self) -> None:
        """Check the leases again."""
        self._waker.wake()

    def stop(self) -> None:
        """Signal the thread to end."""
        self._waker.stop()

    def end(self) -> None:
        """Wait for the thread to end, after `stop`."""
        self._thread.join(JOIN_S)
        if self._thread.is_alive() and self._link is not None:
            self._link.abort()
        self._thread.join()

    def _run(self) -> None:
        try:
            met = meet_puller(self._control, self._secret, self._local.fabric, self._local.now() + GREETING_S)
            self._link, self._nonces = met.link, met.greeting.nonces
            self._serve(self._link, met.early)
        except PeerRefusedError as error:
            if not self._waker.stopped:
                self._refusals.add(error.message)
        except TransferError as error:
            _log.info("a pulling peer disconnected: %s", error.message)
        finally:
            self.waits = False
            if self._link is not None:
                self._link.close()
            self._sends.clear()
            self._staging.clear()
            self._control.close()
            self._waker.close()

    def _serve(self, link: NcclGroupLink, messages: list[Message]) -> None:
        while not self._waker.stopped:
            for message in messages:
                self._hear(message, link)
            self.waits = bool(self._turns)
            if self._turns or messages:
                self.busy_s = self._local.now()
            elif self._local.now() - self.busy_s >= IDLE_S:
                return
            if not self._send_next(link):
                self._control.wait(WAITING_S if self._turns else IDLE_S)
            messages = self._control.take()

    def _hear(self, message: Message, link: NcclGroupLink) -> None:
        match message:
            case PullRequest():
                self._begin(message)
            case ChunkReceived() if self._sends:
                pull, work = self._sends.popleft()
                pull.on_their_way -= 1
                link.finish(work)
            case Withdraw(number):
                self._unconfirmed.pop(number, None)
                if number in self._turns:
                    self._end(number, "closed", "withdrawn")
            case Confirm(number):
                request = self._unconfirmed.pop(number, None)
                if request is not None:
                    reader = BlockPart(request.reader, request.readers)
                    self._book.confirm(request.lease_id, request.fence, reader)
            case StorePut():
                pass
            case _:
                raise TransferError(f"a pulling peer sent an unexpected {type(message).__name__}")

    def _begin(self, request: PullRequest) -> None:
        if request.number in self._turns or request.number in self._unconfirmed:
            raise TransferError(f"pull {request.number} is running already")
        if len(self._turns) + len(self._unconfirmed) >= MAX_PULLS:
            self._control.send(
                End(request.number, "io", f"{MAX_PULLS} pulls of one peer are running already")
            )
            return
        if not self._proves(request):
            self._refusals.add("it asked for a lease of which it has no ticket")
            self._control.send(End(request.number, "ticket", "this pull has no valid ticket"))
            return
        try:
            if min(request.first, request.blocks) < 0:
                raise TransferError(f"invalid pull of {request.blocks} blocks from {request.first}")
            sizes = part_bytes(self._local.shape.block_bytes, BlockPart(request.index, request.of))
        except TransferError as error:
            self._control.send(End(request.number, "layout", error.message))
            return
        self._turns[request.number] = _Pull(request, batch_blocks(sum(sizes), len(sizes), self._local.device))

    def _proves(self, request: PullRequest) -> bool:
        """Return whether the puller has the key of the lease that it names."""
        if not (0 <= request.fence < 1 << 64 and 0 <= request.number < 1 << 64):
            return False
        key = lease_key(self._secret, request.lease_id, request.fence)
        return same(request.proof, request_proof(key, self._nonces, request.number))

    def _send_next(self, link: NcclGroupLink) -> bool:
        """Advance one pull, round robin. Return whether one could advance."""
        for number in list(self._turns):
            self._turns.move_to_end(number)
            if self._advance(link, number, self._turns[number]):
                return True
        return False

    def _advance(self, link: NcclGroupLink, number: int, pull: _Pull) -> bool:
        request = pull.request
        state, total = self._book.look(request.lease_id, request.fence)
        if state is LeaseState.ABSENT:
            # A ticket may arrive before its offer is made.
            return False
        if state is not LeaseState.LIVE:
            self._end(number, *refusal(state, request.lease_id))
        elif request.first + request.blocks > total:
            self._end(number, "layout", f"the pull requests blocks beyond the lease's {total}")
        elif pull.chunks and pull.batch is not None:
            return self._send_chunk(link, number, pull, pull.batch)
        elif pull.opened < request.blocks:
            return self._open_batch(number, pull)
        elif pull.on_their_way:
            return False
        else:
            # Blocks in flight may still be read until they arrive; they are valid because the lease is live
            # by then.
            self._end(number, "", "")
            self._unconfirmed[number] = request
        return True

    def _open_batch(self, number: int, pull: _Pull) -> bool:
        """Announce the complete blocks. Return whether there are any."""
        request = pull.request
        first, left = request.first + pull.opened, request.blocks - pull.opened
        blocks, sums = self._book.complete(request.lease_id, first, min(left, pull.batch_blocks))
        if not blocks:
            return False
        of = request.of
        columns = sums.shape[1] // of if sums.shape[1] % of == 0 else 0
        mine = sums[:, request.index * columns : (request.index + 1) * columns]
        self._control.send(Opening(number, pull.opened, len(blocks), mine.astype(SUMS).tobytes()))
        pull.batch = self._local.memory.batch(blocks, pull.part)
        pull.chunks.extend(pull.batch.chunks())
        pull.opened += len(blocks)
        return True

    def _send_chunk(self, link: NcclGroupLink, number: int, pull: _Pull, batch: CopyBatch) -> bool:
        """Send the next chunk. Return False if too many are in flight."""
        if len(self._sends) == SLOTS:
            return False
        stretch = pull.chunks.popleft()
        tensor = batch.direct(stretch)
        if tensor is None:
            tensor = self._slot()[: batch.size(stretch)]
            batch.gather(stretch, tensor)
        self._control.send(Chunk(number, *stretch))
        self._sends.append((pull, link.send(tensor, tag(self._chunks))))
        self._chunks += 1
        pull.on_their_way += 1
        return True

    def _slot(self) -> Any:
        """Return a staging buffer that no send uses: at most the last SLOTS - 1 are in flight."""
        if not self._staging:
            self._staging = [self._local.memory.staging(self._local.slot_bytes) for _ in range(SLOTS)]
        return self._staging[self._chunks % SLOTS]

    def _end(self, number: int, reason: str, detail: str) -> None:
        del self._turns[number]
        self._control.send(End(number, reason, detail))
