"""A process group's rendezvous with a side that left after the greeting ends by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.nccl import group
from kvasir_workers.transfer.nccl.group import PULLER, Fabric


class AbsentServer:
    """Answers the rendezvous with the puller's own address, where nobody connects for the server's rank."""

    def __init__(self) -> None:
        self.address = b""

    def put(self, key: str, value: bytes) -> None:
        """See StoreRelay."""
        assert key.endswith("/1")
        self.address = value

    def next(self) -> tuple[str, bytes]:
        """See StoreRelay."""
        return "0/0", self.address


@pytest.mark.timeout(30)
def test_the_wait_for_a_side_that_left_ends_after_the_limit_for_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "GLOO_CONNECT_S", 0.5)
    with pytest.raises(TransferError, match="cannot create a process group"):
        Fabric("127.0.0.1", "cpu").link(PULLER, AbsentServer())
