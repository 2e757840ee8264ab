"""Where a worker says that it runs."""

from __future__ import annotations

import pytest

from kvasir.config.load.loader import loads
from kvasir.core.errors import ConfigError
from kvasir.core.locality import Locality, Nic, NicProtocol
from kvasir_platform.apps.common.locality import locality_of

NICS = (Nic("mlx5_0", NicProtocol.RDMA, 400_000_000_000),)
ENVIRON = {
    "KVASIR_NODE": "n1",
    "KVASIR_ZONE": "z1",
    "KVASIR_RACK": " r1 ",
    "KVASIR_NVLINK_DOMAIN": "d1.0",
}


def test_the_environment_and_the_node_say_where_a_worker_runs() -> None:
    pool = loads("name: t", "t.yaml").pool("decode")
    assert locality_of(pool, ENVIRON, NICS) == Locality("n1", "z1", "r1", "d1.0", NICS)


def test_a_variable_that_is_empty_or_not_set_says_nothing() -> None:
    pool = loads("name: t", "t.yaml").pool("decode")
    assert locality_of(pool, {"KVASIR_ZONE": "", "KVASIR_NODE": "n1"}, ()) == Locality("n1")


def test_what_the_spec_says_of_a_pool_takes_precedence() -> None:
    said = ["pools.decode.topology.zone=z2", "pools.decode.topology.nvlink_domain=d2"]
    pool = loads("name: t", "t.yaml", said).pool("decode")
    assert locality_of(pool, ENVIRON, ()) == Locality("n1", "z2", "r1", "d2")


def test_a_variable_with_an_endless_value_is_refused_by_its_name() -> None:
    pool = loads("name: t", "t.yaml").pool("decode")
    with pytest.raises(ConfigError, match="the variable KVASIR_RACK has 300 characters"):
        locality_of(pool, {"KVASIR_RACK": "r" * 300}, ())


@pytest.mark.parametrize("value", ["a b", "-z", "z" * 64])
def test_a_name_in_the_spec_is_the_value_of_a_label(value: str) -> None:
    with pytest.raises(ConfigError, match="zone"):
        loads("name: t", "t.yaml", [f"pools.decode.topology.zone={value}"])
