"""Connection setup of two agents: the greeting on the control connection, then a process group over it.

Both sides run the same steps, except for which one proves its secret first, and have one deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir_workers.transfer.nccl.control import Control
from kvasir_workers.transfer.nccl.group import PULLER, SERVER, Fabric, NcclGroupLink
from kvasir_workers.transfer.nccl.messages import Message, StorePut

GREETING_S = 10.0


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
            for message in self.control.receive(self.deadline_s):
                if isinstance(message, StorePut):
                    self.keys.append(message)
                else:
                    self.others.append(message)
        found = self.keys.pop(0)
        return found.key, found.value


def meet_puller(
    control: Control, secret: bytes, fabric: Fabric, deadline_s: float
) -> tuple[NcclGroupLink, list[Message]]:
    """Return the serving side's link, and the messages the puller has already sent. Raise TransferError."""
    control.admit(secret, deadline_s)
    relay = _Relay(control, deadline_s)
    return fabric.link(SERVER, relay), relay.others


def meet_server(
    control: Control, secret: bytes, fabric: Fabric, deadline_s: float
) -> tuple[NcclGroupLink, list[Message]]:
    """Return the pulling side's link, and the messages the server has already sent. Raise TransferError."""
    control.enter(secret, deadline_s)
    relay = _Relay(control, deadline_s)
    return fabric.link(PULLER, relay), relay.others
