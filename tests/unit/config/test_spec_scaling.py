"""Settings of autoscaled pools; invalid ones are refused before anything starts."""

from __future__ import annotations

import pytest

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment, PoolScalingSpec, PoolSpec, ScalingSpec
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role


def pool(name: str, role: Role | None = None, low: int | None = 1, high: int = 4, **more: object) -> PoolSpec:
    known: dict[str, object] = {"name": name, "role": role or Role(name), "replicas": max(1, low or 0)}
    if low is not None:
        known["scaling"] = PoolScalingSpec(min=low, max=high)
    return PoolSpec.model_validate(known | more)


def deployment(*pools: PoolSpec, **scaling: object) -> Deployment:
    return Deployment(pools=pools, scaling=ScalingSpec.model_validate(scaling))


def test_without_bounds_nothing_is_sized() -> None:
    spec = Deployment()
    assert not spec.scales
    assert [each.most for each in spec.pools] == [1, 1]
    assert not spec.scales_to_zero(spec.pool("prefill"))


def test_a_pool_with_bounds_is_sized_unless_that_is_left_to_people() -> None:
    pools = pool("prefill"), pool("decode", low=None)
    assert deployment(*pools).scales
    assert deployment(*pools, mode="advise").scales
    assert not deployment(*pools, mode="manual").scales
    assert [each.most for each in pools] == [4, 1]


def test_least_more_than_most_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"(?s)pools\[0\]\.scaling.*min 5 is more than max 4"):
        load(None, ["pools.0.scaling.min=5", "pools.0.scaling.max=4"])


@pytest.mark.parametrize("replicas", [1, 5])
def test_a_pool_begins_within_its_bounds(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"decode starts with {replicas}, outside of the bounds 2"):
        pool("decode", low=2, replicas=replicas)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "sometimes"),
        ("attainment", "1"),
        ("attainment", "0.5"),
        ("interval_s", "0.5"),
        ("window_s", "-1"),
        ("idle_s", "0"),
        ("stale_s", "1"),
        ("start_s", "0"),
        ("target", "3"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_path(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, [f"scaling.{field}={value}"])
    assert f"scaling.{field}" in refused.value.message


# -- sleep -------------------------------------------------------------------------------------------


def test_a_model_whose_pools_may_all_be_empty_sleeps() -> None:
    spec = deployment(pool("prefill", low=0), pool("decode", low=0))
    assert all(spec.scales_to_zero(each) for each in spec.pools)
    manual = deployment(pool("prefill", low=0), pool("decode", low=0), mode="manual")
    assert not any(manual.scales_to_zero(each) for each in manual.pools)


@pytest.mark.parametrize("low", [1, None], ids=["it has one at least", "it has a size of its own"])
def test_a_model_sleeps_as_a_whole(low: int | None) -> None:
    with pytest.raises(ValueError, match=r"prefill can scale to zero .* and decode of the same model"):
        deployment(pool("prefill", low=0), pool("decode", low=low))


def test_one_model_may_sleep_while_another_does_not() -> None:
    spec = Deployment.model_validate(
        {
            "disaggregation": "never",
            "models": [{"source": "kvasir-tiny", "name": "second", "disaggregation": "never"}],
            "pools": [
                {"name": "one", "role": "both", "scaling": {"min": 0, "max": 2}},
                {"name": "two", "role": "both", "model": "second"},
            ],
        }
    )
    assert [spec.scales_to_zero(each) for each in spec.pools] == [True, False]


# -- partners ----------------------------------------------------------------------------------------


def test_a_prefill_and_a_decode_pool_that_are_alike_can_do_each_others_work() -> None:
    spec = deployment(pool("prefill"), pool("decode", high=9))
    assert (spec.partner("prefill"), spec.partner("decode")) == ("decode", "prefill")


@pytest.mark.parametrize(
    "other",
    [
        pool("decode", low=None),
        pool("decode", gpus=1.0),
        pool("decode", cpus=4.0),
        pool("decode", kv_index="reported"),
        pool("decode", engine={"max_num_seqs": 8}),
    ],
    ids=["not sized", "on other devices", "on other cores", "known otherwise", "with another engine"],
)
def test_pools_that_differ_do_not(other: PoolSpec) -> None:
    spec = deployment(pool("prefill"), other)
    assert spec.partner("prefill") is None
    assert spec.partner("decode") is None


def test_no_partners_where_flips_are_off_or_the_work_has_one_part() -> None:
    assert deployment(pool("prefill"), pool("decode"), flips=False).partner("prefill") is None
    both = pool("prefill"), pool("decode"), pool("both")
    assert deployment(*both).partner("both") is None
    with pytest.raises(KeyError):
        deployment(*both).partner("embed")


def test_pools_of_different_models_are_no_partners() -> None:
    pools = [
        {"name": f"{role}-{model}", "role": role, "model": model, "scaling": {"max": 2}}
        for model in ("one", "two")
        for role in ("prefill", "decode")
    ]
    spec = Deployment.model_validate(
        {
            "model": {"source": "kvasir-tiny", "served_name": "one"},
            "models": [{"source": "kvasir-tiny", "name": "two"}],
            "pools": pools,
        }
    )
    assert spec.partner("prefill-one") == "decode-one"
    for view in spec.views():
        names = [each.name for each in view.pools]
        assert [view.partner(name) for name in names] == names[::-1]
