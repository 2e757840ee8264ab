"""A control process takes over the pools of an earlier one, and replaces only what has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.config.spec.deployment import Deployment, GatewaySpec, PoolScalingSpec, ScalingSpec
from kvasir.config.spec.routing import PerformanceSpec
from kvasir_platform.cluster.ray.pool_records import PoolRecord, record_key, resumed, spec_digest

DEPLOYMENT = Deployment()
DECODE = DEPLOYMENT.pool("decode")


def with_decode(**update: object) -> Deployment:
    pools = [pool.model_dump() for pool in DEPLOYMENT.pools]
    pools[1] |= update
    return Deployment.model_validate({"pools": pools})


def test_a_pool_that_nobody_left_begins_as_the_spec_says() -> None:
    record = resumed(None, with_decode(replicas=3), with_decode(replicas=3).pool("decode"))
    assert (record.version, record.wanted) == (1, 3)
    assert Deployment.model_validate_json(record.spec).pool("decode").replicas == 3


def test_an_unchanged_pool_goes_on_as_it_was_left_with_the_replicas_that_were_asked_for() -> None:
    left = replace(resumed(None, DEPLOYMENT, DECODE), wanted=5, version=7)
    assert resumed(PoolRecord.decode(left.encode()), DEPLOYMENT, DECODE) == left


def test_another_number_in_the_spec_wins_over_what_was_asked_for_before() -> None:
    left = PoolRecord(1, 5, 1, spec_digest(DEPLOYMENT, DECODE), "{}")
    changed = with_decode(replicas=2)
    record = resumed(left, changed, changed.pool("decode"))
    assert (record.version, record.wanted) == (1, 2)


def test_a_changed_engine_makes_another_version_of_its_own_pool_only() -> None:
    changed = with_decode(engine={"max_num_seqs": 32})
    for pool, version in (("prefill", 1), ("decode", 2)):
        left = resumed(None, DEPLOYMENT, DEPLOYMENT.pool(pool))
        assert resumed(left, changed, changed.pool(pool)).version == version


@pytest.mark.parametrize(
    "update",
    [
        {"gateway": GatewaySpec(port=9000)},
        {"ready_when": "any_model"},
        {"performance": PerformanceSpec(profile="/profile.json")},
    ],
    ids=["the gateway", "readiness", "a profile"],
)
def test_what_only_routers_read_restarts_no_worker(update: dict[str, object]) -> None:
    assert spec_digest(DEPLOYMENT.model_copy(update=update), DECODE) == spec_digest(DEPLOYMENT, DECODE)


def test_every_field_of_the_spec_is_known_to_concern_workers_or_routers() -> None:
    """A field that is added must be put on one side: one that workers read and the digest does not see would
    be taken over by no replica."""
    routers = {
        *("version", "models", "ready_when", "pools", "routing", "admission", "slo", "tenancy", "gateway"),
        *("tokenizer", "api", "output_filters", "discovery", "ray", "telemetry", "scaling", "performance"),
        *("routes", "cost", "regions"),
    }
    workers = {
        "name",
        "model",
        "lora",
        "lora_loading",
        "disaggregation",
        "transfer",
        "tiers",
        "worker",
        "tls",
    }
    assert set(Deployment.model_fields) == routers | workers


def test_workers_that_may_have_to_do_another_pools_work_are_others_and_sizes_are_not() -> None:
    sized = {"scaling": PoolScalingSpec(max=4)}
    alike = Deployment(pools=tuple(pool.model_copy(update=sized) for pool in Deployment().pools))
    apart = alike.model_copy(update={"scaling": ScalingSpec(flips=False)})
    decode, plain = Deployment().pool("decode"), spec_digest(Deployment(), Deployment().pool("decode"))
    assert spec_digest(apart, apart.pool("decode")) == plain
    assert spec_digest(alike, alike.pool("decode")) != plain
    more = alike.model_copy(update={"scaling": ScalingSpec(mode="manual", interval_s=60.0)})
    assert spec_digest(more, more.pool("decode")) == spec_digest(alike, alike.pool("decode"))
    assert decode.scaling is None


def test_two_deployments_and_two_pools_keep_their_records_apart() -> None:
    keys = {record_key(name, pool) for name in ("a", "b") for pool in ("c", "d")}
    assert len(keys) == 4


def test_another_template_of_pods_makes_another_version_that_needs_other_pods() -> None:
    left = resumed(None, DEPLOYMENT, DECODE, "old")
    record = resumed(left, DEPLOYMENT, DECODE, "new")
    assert (record.version, record.template, record.before) == (2, "new", left)
    assert record.of_other_pods
    assert not resumed(left, DEPLOYMENT, DECODE, "old").of_other_pods


def test_a_spec_and_a_template_that_change_at_once_are_one_change() -> None:
    changed = with_decode(engine={"max_num_seqs": 32})
    left = resumed(None, DEPLOYMENT, DECODE, "old")
    record = resumed(left, changed, changed.pool("decode"), "new")
    assert record.version == 2
    assert record.of_other_pods
    assert resumed(record, changed, changed.pool("decode"), "new") == record


def test_the_way_back_in_the_midst_of_a_roll_leaves_the_replicas_alone_that_are_right() -> None:
    left = replace(resumed(None, DEPLOYMENT, DECODE, "old"), wanted=5)
    rolling = resumed(left, DEPLOYMENT, DECODE, "new")
    back = resumed(PoolRecord.decode(rolling.encode()), DEPLOYMENT, DECODE, "old")
    assert replace(back, before=None) == left
    assert back.before == replace(rolling, before=None)
    # What comes next is neither of the two.
    assert resumed(back, DEPLOYMENT, DECODE, "third").version == 3


def test_a_record_keeps_one_that_it_replaces_and_not_what_that_replaced() -> None:
    first = resumed(None, DEPLOYMENT, DECODE, "a")
    third = resumed(resumed(first, DEPLOYMENT, DECODE, "b"), DEPLOYMENT, DECODE, "c")
    assert third.before is not None
    assert (third.before.template, third.before.before) == ("b", None)
