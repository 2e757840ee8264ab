"""Connection setup of two agents: the greeting on the control connection, then a link over it.

Both sides run the same steps, except for which one proves its key first, and have one deadline for what the
control connection carries. The data ports let anyone connect, so each side also proves over the
group itself, within GREETING_S, that it is the one of the greeting. No block is sent before.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.lease_keys import MAC_BYTES, same
from kvasir_workers.transfer.nccl.control import Control, Greeting, LeaseClaim
from kvasir_workers.transfer.nccl.group import PULLER, Fabric, NcclGroupLink
from kvasir_workers.transfer.nccl.messages import Message, PairProven, StorePut
from kvasir_workers.transfer.nccl.sockets import SERVER

GREETING_S = 10.0
PROOF_TAG = 0
"""Chunks have greater tags."""


class PeerRefusedError(TransferError):
    """A peer did not prove that it has a ticket."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A pair that has met: its link, the messages that the other side has already sent, and its greeting."""

    link: NcclGroupLink
    early: list[Message]
    greeting: Greeting


@dataclass(slots=True)
class _Relay:
    """Relays store keys, and queues other messages in order."""

    control: Control
    deadline_s: float
    keys: list[StorePut] = field(default_factory=list)
    others: list[Message] = field(default_factory=list)

    def put(self, key: str, value: bytes) -> None:
        self.control.send(StorePut(key, value))

    def next(self) -> tuple[str, bytes]:
        while not self.keys:
            self.hear()
        found = self.keys.pop(0)
        return found.key, found.value

    def await_connection(self, listener: socket.socket) -> None:
        while not self.control.comes_to(listener, self.deadline_s):
            self.hear()

    def wait_for_proven(self) -> None:
        """Wait until the puller has authenticated this side."""
        while PairProven() not in self.others:
            self.hear()
        self.others.remove(PairProven())

    def hear(self) -> None:
        for message in self.control.receive(self.deadline_s):
            if isinstance(message, StorePut):
                self.keys.append(message)
            else:
                self.others.append(message)


def meet_puller(control: Control, secret: bytes, fabric: Fabric, deadline_s: float) -> Meeting:
    """Meet a puller as the serving side. Raise PeerRefusedError if it has no ticket, TransferError if the
    connection cannot be set up."""
    try:
        greeting = control.admit(secret, deadline_s)
    except TransferError as error:
        raise PeerRefusedError(error.message) from error
    relay = _Relay(control, deadline_s)
    link = fabric.link(SERVER, relay)
    try:
        _expect(fabric, link, greeting.proof(b"pull over the group"))
        sent = link.send(fabric.tensor(greeting.proof(b"serve over the group")), PROOF_TAG)
        relay.wait_for_proven()
        link.finish(sent, GREETING_S)
    except TransferError:
        link.close()
        raise
    return Meeting(link, relay.others, greeting)


def meet_server(control: Control, claim: LeaseClaim, fabric: Fabric, deadline_s: float) -> Meeting:
    """Meet a server as the pulling side. Raise TransferError."""
    greeting = control.enter(claim, deadline_s)
    relay = _Relay(control, deadline_s)
    link = fabric.link(PULLER, relay)
    try:
        sent = link.send(fabric.tensor(greeting.proof(b"pull over the group")), PROOF_TAG)
        _expect(fabric, link, greeting.proof(b"serve over the group"))
        link.finish(sent, GREETING_S)
        control.send(PairProven())
    except TransferError:
        link.close()
        raise
    return Meeting(link, relay.others, greeting)


def _expect(fabric: Fabric, link: NcclGroupLink, proof: bytes) -> None:
    """Receive the other side's proof. Raise PeerRefusedError if it is another."""
    received = fabric.tensor(bytes(MAC_BYTES))
    link.finish(link.receive(received, PROOF_TAG), GREETING_S)
    if not same(received.cpu().numpy().tobytes(), proof):
        raise PeerRefusedError("who connected to the data port is not who has the ticket")
