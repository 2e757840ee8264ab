"""The transfer adapters by name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvasir.core.errors import ConfigError
from kvasir_workers.connector.adapters import make_transfer
from kvasir_workers.transfer.nccl.adapter import NcclTransfer
from kvasir_workers.transfer.nixl.adapter import NixlTransfer


@pytest.mark.parametrize(("kind", "adapter"), [("nixl", NixlTransfer), ("nccl", NcclTransfer)])
def test_each_kind_of_the_spec_has_its_adapter(kind: str, adapter: type) -> None:
    assert isinstance(make_transfer(kind, "127.0.0.1", 1), adapter)


def test_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'mpi' is not one of: nixl, nccl"):
        make_transfer("mpi", "127.0.0.1", 1)
