"""The receiver side: one thread for each agent that is pulled from.

The step loop hands over pulls and collects results. The threads connect to the sender, receive chunks into
staging and copy them into blocks: see pulls.py for why a late chunk is harmless.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import PullFailed, PullSucceeded
from kvasir_workers.transfer.common.lease_keys import opened_one
from kvasir_workers.transfer.common.pulls import KvShape, PullSpec, check_fits
from kvasir_workers.transfer.nccl.control import Control, LeaseClaim, Waker, request_proof, socket_for
from kvasir_workers.transfer.nccl.endpoint import NcclEndpoint, decode
from kvasir_workers.transfer.nccl.group import NcclGroupLink
from kvasir_workers.transfer.nccl.local import SLOTS, Local, tag
from kvasir_workers.transfer.nccl.meeting import GREETING_S, meet_server
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
from kvasir_workers.transfer.nccl.pulls import CancelResult, NcclPull

MAX_AGENTS = 64
MAX_PULLS = 1024
MAX_INBOX = 256
IDLE_S = 60.0
JOIN_S = 0.05


class NcclReceiver:
    """The running pulls."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._pulls: dict[str, tuple[NcclPull, PulledAgent]] = {}
        self._agents: OrderedDict[NcclEndpoint, PulledAgent] = OrderedDict()
        self._retired: list[PulledAgent] = []
        self._ended: deque[PullSucceeded | PullFailed] = deque()

    def pull(self, wanted: PullSpec) -> None:
        """Begin a pull. Errors are reported as PullFailed by `poll`. Raise TransferError only if a pull of
        this id is running."""
        if wanted.pull_id in self._pulls:
            raise TransferError(f"pull {wanted.pull_id} is under way already")
        try:
            packed, key = opened_one(wanted.offer.endpoint)
            endpoint = decode(packed)
            size = self._check_fits(endpoint, wanted)
        except TransferError as error:
            self._ended.append(wanted.failed("layout", error.message))
            return
        pull = NcclPull(wanted, size, self._local, self._ended)
        claim = LeaseClaim(wanted.offer.lease_id, wanted.offer.fence, key)
        agent = None if len(self._pulls) >= MAX_PULLS else self._begin(pull, endpoint, claim)
        if agent is None:
            detail = f"{len(self._pulls)} pulls from {len(self._agents)} agents are running already"
            pull.fail("io", detail)
            return
        self._pulls[wanted.pull_id] = (pull, agent)

    def poll(self) -> list[PullSucceeded | PullFailed]:
        """Return the pulls that ended since the last call."""
        for pull, agent in self._pulls.values():
            if pull.over or not pull.late:
                continue
            # An agent that let a pull time out may hang: the next pull makes a fresh connection.
            match pull.give_up():
                case CancelResult.ENDED:
                    agent.retire()
                case CancelResult.EXPECTING:
                    agent.abandon()
                case CancelResult.COPYING:
                    pass
        ended = []
        while self._ended:
            event = self._ended.popleft()
            self._pulls.pop(event.pull_id, None)
            ended.append(event)
        return ended

    def close(self) -> list[PullSucceeded | PullFailed]:
        """Fail the running pulls, and return when no thread writes to KV memory. Returns the pulls that ended
        since the last poll."""
        agents = [*self._agents.values(), *self._retired]
        for agent in agents:
            agent.stop()
        for agent in agents:
            agent.end()
        self._local.sums.close()
        return self.poll()

    def _begin(self, pull: NcclPull, endpoint: NcclEndpoint, claim: LeaseClaim) -> PulledAgent | None:
        """Return the agent that accepted the pull, or None if there are too many."""
        agent = self._agent(endpoint, claim)
        while agent is not None and not agent.begin(pull, claim.key):
            # Its thread ended, idle, after `_agent` looked.
            agent = self._agent(endpoint, claim)
        return agent

    def _agent(self, endpoint: NcclEndpoint, claim: LeaseClaim) -> PulledAgent | None:
        """Return the thread for an endpoint, or None if there are too many. A new one enters with the
        claim."""
        self._retired = [agent for agent in self._retired if agent.alive]
        found = self._agents.get(endpoint)
        if found is not None and found.open:
            self._agents.move_to_end(endpoint)
            return found
        if found is not None:
            self._retired.append(self._agents.pop(endpoint))
        if len(self._agents) >= MAX_AGENTS:
            idle = next((key for key, agent in self._agents.items() if not agent.busy), None)
            if idle is None:
                return None
            leaving = self._agents.pop(idle)
            leaving.retire()
            self._retired.append(leaving)
        if len(self._retired) >= MAX_AGENTS:
            return None
        agent = PulledAgent(endpoint, claim, self._local)
        self._agents[endpoint] = agent
        return agent

    def _check_fits(self, endpoint: NcclEndpoint, wanted: PullSpec) -> int:
        local = self._local
        devices = [] if endpoint.device == local.device else [f"device: {local.device} != {endpoint.device}"]
        remote = KvShape(endpoint.layout, endpoint.block_bytes, 0)
        return check_fits(wanted, local.shape, remote, endpoint.name, devices)


class PulledAgent:
    """One serving agent and the thread that pulls from it, until it is retired, breaks or is idle."""

    def __init__(self, endpoint: NcclEndpoint, claim: LeaseClaim, local: Local) -> None:
        self._endpoint = endpoint
        self._claim = claim
        self._nonces = b""
        self._local = local
        self._waker = Waker()
        self._lock = threading.Lock()
        self._open = True
        self._begun: deque[tuple[NcclPull, bytes]] = deque()
        self._pulls: dict[int, NcclPull] = {}
        self._withdrawn: set[int] = set()
        self._next_number = 0
        self._stopping: tuple[str, str] | None = None
        self._failure: tuple[str, str] | None = None
        self._link: NcclGroupLink | None = None
        self._inbox: deque[Message] = deque()
        self._free: list[int] = list(range(SLOTS))
        self._staging: list[Any] = []
        self._arriving: deque[tuple[Chunk, int, Any, Any]] = deque()
        self._chunks = 0
        self._thread = threading.Thread(target=self._run, name="kv-nccl-pull", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether it accepts pulls."""
        return self._open

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether it has pulls."""
        return bool(self._begun or self._pulls)

    def begin(self, pull: NcclPull, key: bytes) -> bool:
        """Accept a pull with the key of its lease, which then ends in any case. Return False if this agent
        ended without a failure."""
        with self._lock:
            if self._open:
                self._begun.append((pull, key))
                self._waker.wake()
                return True
            failure = self._failure
        if failure is None:
            return False
        self._fail(pull, failure)
        return True

    def retire(self) -> None:
        """Accept no more pulls; the thread ends with the last one."""
        with self._lock:
            self._open = False
        self._waker.wake()

    def stop(self) -> None:
        """Signal the thread to end."""
        self._stopping = ("closed", "the pulling agent was closed")
        self._waker.stop()

    def abandon(self) -> None:
        """Cut the connection without waiting; the thread then fails its pulls."""
        self.retire()
        link = self._link
        if link is not None and self._stopping is None:
            self._stopping = ("io", "the connection was cut because another pull timed out")
            self._waker.stop()
            # On a thread, since it takes longer than the step loop may wait.
            threading.Thread(target=link.abort, name="kv-nccl-abort", daemon=True).start()

    def end(self) -> None:
        """Wait for the thread to end, after `stop`."""
        self._thread.join(JOIN_S)
        if self._thread.is_alive() and self._link is not None:
            self._link.abort()
        self._thread.join()

    def _run(self) -> None:
        failure: tuple[str, str] | None = ("io", "the connection broke")
        control: Control | None = None
        try:
            deadline_s = self._local.now() + GREETING_S
            control = Control(socket_for(self._endpoint.host), self._waker, self._local.now)
            control.connect((self._endpoint.host, self._endpoint.port), deadline_s)
            met = meet_server(control, self._claim, self._local.fabric, deadline_s)
            self._link, self._nonces = met.link, met.greeting.nonces
            self._inbox.extend(met.early)
            self._receive(control, self._link)
            failure = None
        except TransferError as error:
            failure = ("io" if self._link is not None else "unreachable", error.message)
        finally:
            self._leave(control, self._stopping or failure)

    def _leave(self, control: Control | None, failure: tuple[str, str] | None) -> None:
        if self._link is not None:
            self._link.close()
        with self._lock:
            self._open = False
            self._failure = failure
            left = [*(pull for pull, _ in self._begun), *self._pulls.values()]
        for pull in left:
            self._fail(pull, failure or ("io", "the connection ended"))
        self._arriving.clear()
        self._staging.clear()
        if control is not None:
            control.close()
        self._waker.close()

    def _fail(self, pull: NcclPull, failure: tuple[str, str]) -> None:
        reason, detail = failure
        pull.fail(reason, f"agent {self._endpoint.name}: {detail}")

    def _receive(self, control: Control, link: NcclGroupLink) -> None:
        idle_since = self._local.now()
        while not self._waker.stopped:
            self._tell(control)
            if len(self._inbox) < MAX_INBOX:
                self._inbox.extend(control.take())
            if self._take(control, link):
                idle_since = self._local.now()
            elif self._arriving:
                self._arrive(control, link)
            elif not self._rest(control, idle_since):
                return

    def _tell(self, control: Control) -> None:
        """Send requests for new pulls, and withdraw the cancelled ones."""
        while self._begun:
            pull, key = self._begun[0]
            if not pull.over:
                number, self._next_number = self._next_number, self._next_number + 1
                self._pulls[number] = pull
                request = PullRequest(
                    number,
                    pull.wanted.offer.lease_id,
                    pull.wanted.offer.fence,
                    pull.wanted.first,
                    len(pull.wanted.targets),
                    pull.wanted.source.index,
                    pull.wanted.source.of,
                    pull.wanted.reader.index,
                    pull.wanted.reader.of,
                    request_proof(key, self._nonces, number),
                )
                control.send(request)
            self._begun.popleft()
        for number, pull in self._pulls.items():
            if pull.over and number not in self._withdrawn:
                self._withdrawn.add(number)
                control.send(Withdraw(number))

    def _take(self, control: Control, link: NcclGroupLink) -> bool:
        """Handle messages in order, as far as the chunks in flight allow. Return whether there was one."""
        acted = False
        while self._inbox:
            message = self._inbox[0]
            match message:
                case Opening():
                    if any(chunk.number == message.number for chunk, _, _, _ in self._arriving):
                        return acted
                    self._open_batch(message)
                case Chunk():
                    if not self._free:
                        return acted
                    self._expect(message, link)
                case End(number):
                    if any(chunk.number == number for chunk, _, _, _ in self._arriving):
                        return acted
                    self._finish(message, control)
                case StorePut():
                    pass
                case _:
                    raise TransferError(f"the sender sent an unexpected {type(message).__name__}")
            self._inbox.popleft()
            acted = True
        return acted

    def _pull(self, number: int) -> NcclPull:
        pull = self._pulls.get(number)
        if pull is None:
            raise TransferError("the sender sends or ends a pull that is not running")
        return pull

    def _open_batch(self, opening: Opening) -> None:
        if opening.blocks < 1 or len(opening.sums) % (SUMS.itemsize * opening.blocks):
            raise TransferError("the sender sends an invalid number of blocks or sums")
        sums = opening.sums if self._local.compares else b""
        theirs = np.frombuffer(sums, dtype=SUMS).reshape(opening.blocks, -1)
        self._pull(opening.number).open(opening.first, theirs)

    def _expect(self, chunk: Chunk, link: NcclGroupLink) -> None:
        tensor, size = self._pull(chunk.number).expect((chunk.start, chunk.stop))
        slot = self._free[-1]
        staged = None
        if tensor is None:
            if size > self._local.slot_bytes:
                raise TransferError(
                    f"the sender sends a chunk of {size} bytes, more than {self._local.slot_bytes}"
                )
            if not self._staging:
                self._staging = [self._local.memory.staging(self._local.slot_bytes) for _ in range(SLOTS)]
            tensor = staged = self._staging[slot][:size]
        work = link.receive(tensor, tag(self._chunks))
        self._free.pop()
        self._chunks += 1
        self._arriving.append((chunk, slot, staged, work))

    def _arrive(self, control: Control, link: NcclGroupLink) -> None:
        """Wait for the oldest chunk while receives of the next ones run, and store it."""
        chunk, slot, staged, work = self._arriving[0]
        link.finish(work)
        control.send(ChunkReceived())
        self._inbox.extend(control.take())
        self._take(control, link)
        self._arriving.popleft()
        self._pull(chunk.number).store((chunk.start, chunk.stop), staged)
        self._free.append(slot)

    def _finish(self, end: End, control: Control) -> None:
        pull = self._pull(end.number)
        known = end.number in self._withdrawn
        if not end.reason and not pull.over and not pull.whole:
            raise TransferError("the sender ends a pull with missing blocks")
        del self._pulls[end.number]
        self._withdrawn.discard(end.number)
        if end.reason:
            pull.fail(end.reason, end.detail)
            return
        if pull.succeed():
            control.send(Confirm(end.number))
        elif not known:
            control.send(Withdraw(end.number))

    def _rest(self, control: Control, idle_since: float) -> bool:
        """Wait for an event. Return False if the thread should end."""
        with self._lock:
            at_rest = not self._begun and not self._pulls
            if at_rest and (not self._open or self._local.now() - idle_since >= IDLE_S):
                self._open = False
                return False
            retiring = not self._open
        if retiring and all(pull.over for pull in self._pulls.values()) and not self._begun:
            return False
        control.wait(IDLE_S)
        return True
