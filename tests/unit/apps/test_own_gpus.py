"""The GPUs of a worker outside of Ray, whose spec leaves their number open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.kit.engines.stub_engine import IDENTITY

from kvasir.config.load.loader import load
from kvasir.core.errors import ConfigError
from kvasir.core.identity import Hardware
from kvasir.hardware.offers import OFFERS
from kvasir_platform.apps.common.own_gpus import with_own_gpus
from kvasir_platform.gateway.costs.prices import Prices

WIDE = ("pools.decode.engine.tensor_parallel_size=2", "pools.decode.replicas=3")


def test_it_has_one_for_each_rank_however_many_workers_the_pool_has() -> None:
    found = with_own_gpus(load(None, WIDE), "decode", present=2, platform="cuda")
    assert [pool.gpus for pool in found.pools] == ["auto", 2.0]
    assert found.pool("decode").replicas == 3


def test_it_computes_on_cpus_with_the_build_for_them() -> None:
    assert with_own_gpus(load(None), "decode", present=1, platform="cpu").pool("decode").gpus == 0.0


def test_the_build_for_gpus_needs_one() -> None:
    with pytest.raises(ConfigError, match="there is no GPU here for decode; run it where the GPUs are"):
        with_own_gpus(load(None), "decode", present=0, platform="cuda")


def test_routers_take_its_price_from_the_gpus_that_it_reports() -> None:
    prices = Prices(load(None))
    reported = replace(IDENTITY, hardware=Hardware("NVIDIA H100 80GB HBM3", devices=2))
    on_gpus, on_cpus = prices.of("decode", reported), prices.of("decode", IDENTITY)
    each = OFFERS["H100"].dollars_per_hour
    assert each is not None
    assert (on_gpus.gpus, on_gpus.per_hour) == (2.0, 2 * each)
    assert on_cpus.gpus == prices.of("decode", None).gpus == 0.0
