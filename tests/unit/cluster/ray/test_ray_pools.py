"""Requests to Ray Serve when a pool's spec or its pods change, and when that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve as ray_serve

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray import pools as ray_pools
from kvasir_platform.cluster.ray.pod_templates import PodTemplate, pool_resource, template_resource
from kvasir_platform.cluster.ray.pools import RayPools
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.pool.failures import StartFailure
from kvasir_workers.pool.followers import NodePlan

OLD, NEW = "0123456789ab", "ba9876543210"


async def start_node(deployment: Deployment, pool: str, token: str, place: NodePlace | None) -> Any:
    raise AssertionError("nothing runs here")


async def follow(deployment: Deployment, pool: str, rank: int, place: NodePlace) -> str:
    raise AssertionError("nothing runs here")


def lead(deployment: Deployment) -> NodePlace:
    raise AssertionError("nothing runs here")


def spec(replicas: int, **update: object) -> Deployment:
    decode = {"name": "decode", "role": "both", "replicas": replicas, **update}
    return Deployment.model_validate({"disaggregation": "never", "pools": [decode]})


class Serve:
    """A fake of Ray that keeps the records of control processes and the last request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.free: dict[str, float] = {}
        self.asked: dict[str, Any] = {}
        self.forgotten: list[tuple[str, str]] = []

        def put(key: bytes, value: bytes, *, overwrite: bool, namespace: str) -> None:
            self.kept[key] = value

        def get(key: bytes, *, namespace: str) -> bytes | None:
            return self.kept.get(key)

        monkeypatch.setattr(ray_pools, "_internal_kv_put", put)
        monkeypatch.setattr(ray_pools, "_internal_kv_get", get)
        monkeypatch.setattr(ray_pools, "forget_failure", lambda *of: self.forgotten.append(of))
        monkeypatch.setattr(ray, "available_resources", lambda: self.free)
        monkeypatch.setattr(ray_serve, "status", lambda: SimpleNamespace(applications={}))
        monkeypatch.setattr(ray_serve, "run_many", self.run_many)
        controller = SimpleNamespace(update_deployment_replicas=SimpleNamespace(remote=self.update))
        monkeypatch.setattr(ray, "get_actor", lambda _name, namespace: controller)
        monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)

    def update(self, _deployment: object, replicas: int) -> None:
        self.asked["replicas"] = replicas

    def run_many(self, targets: list[Any], **_: object) -> None:
        (target,) = targets
        deployment = target.target._bound_deployment
        config = deployment._deployment_config
        self.asked = {
            "version": deployment.version,
            "replicas": config.num_replicas,
            "surge": config.max_surge_percent > 0,
            "at_a_time": config.rolling_update_percentage,
            "resources": deployment.ray_actor_options.get("resources"),
            "gpus": deployment.ray_actor_options["num_gpus"],
        }

    def control(self, deployment: Deployment, template: str = OLD, pods: int = 2) -> RayPools:
        """A control process that starts, or takes over."""
        desired = {"decode": PodTemplate(template, pods)}
        pools = RayPools(deployment, "10.0.0.1:6379", in_pods=True, pods=desired)
        clock = SimpleNamespace(now=lambda: 0.0)
        pools.deploy(start_node, clock, "token", NodePlan(follow=follow, lead=lead))
        return pools


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    return Serve(monkeypatch)


def desired(pools: RayPools, deployment: Deployment, template: str, pods: int = 2) -> None:
    pools.adopt(deployment, {"decode": PodTemplate(template, pods)})


def pods_of(template: str) -> dict[str, int]:
    return {pool_resource("decode"): 1, template_resource(template): 1}


def test_a_changed_template_is_another_version_whose_replicas_need_pods_of_it(serve: Serve) -> None:
    pools = serve.control(spec(2))
    assert (serve.asked["version"], serve.asked["resources"]) == ("1", pods_of(OLD))
    desired(pools, spec(2), NEW)
    assert (serve.asked["version"], serve.asked["resources"]) == ("2", pods_of(NEW))
    # One at a time: a surge of one, whatever the pool's size.
    assert int(serve.asked["at_a_time"] * 100) == 1


@pytest.mark.parametrize(
    ("replicas", "pods", "beside"),
    [(2, 2, False), (2, 3, True), (1, 1, True)],
    ids=["no room", "room for one more", "the only one"],
)
def test_a_replica_is_stopped_first_where_no_pod_more_may_be_and_the_only_one_never(
    serve: Serve, replicas: int, pods: int, beside: bool
) -> None:
    pools = serve.control(spec(replicas), pods=pods)
    # A pod that is free temporarily during a roll does not count as room.
    serve.free = dict.fromkeys(pods_of(NEW), 1.0)
    desired(pools, spec(replicas), NEW, pods)
    assert serve.asked["surge"] is beside


def test_in_its_own_pods_a_changed_spec_needs_one_that_is_free_and_of_the_right_template(
    serve: Serve,
) -> None:
    pools = serve.control(spec(2))
    serve.free = dict.fromkeys(pods_of(NEW), 1.0)
    desired(pools, spec(2, engine={"max_num_seqs": 32}), OLD)
    assert serve.asked["surge"] is False
    serve.free = dict.fromkeys(pods_of(OLD), 1.0)
    desired(pools, spec(2, engine={"max_num_seqs": 16}), OLD)
    assert serve.asked["surge"] is True


def test_where_none_comes_up_beside_the_others_each_is_stopped_first_and_only_once_so(serve: Serve) -> None:
    pools = serve.control(spec(2))
    desired(pools, spec(2), NEW, pods=3)
    assert pools.stop_first("decode")
    assert (serve.asked["version"], serve.asked["surge"]) == ("2", False)
    assert not pools.stop_first("decode")
    # The next roll tries a surge again.
    pools.confirm("decode")
    desired(pools, spec(2), OLD, pods=3)
    assert serve.asked["surge"] is True


def test_the_only_replica_is_not_stopped_first_even_where_none_comes_up_beside_it(serve: Serve) -> None:
    pools = serve.control(spec(1))
    desired(pools, spec(1), NEW)
    assert not pools.stop_first("decode")


def test_a_pool_that_is_settled_asks_for_exactly_what_it_had(serve: Serve) -> None:
    pools = serve.control(spec(2, gpus=1.0))
    had = dict(serve.asked)
    desired(pools, spec(2, gpus=4.0, engine={"max_num_seqs": 32}), NEW)
    assert serve.asked["gpus"] == 4
    assert pools.settle("decode")
    assert serve.asked == had
    assert not pools.settle("decode")


def test_a_settled_pool_is_tried_again_when_asked_to(serve: Serve) -> None:
    pools = serve.control(spec(2))
    desired(pools, spec(2), NEW)
    pools.settle("decode")
    pools.retry("decode")
    assert (serve.asked["version"], serve.asked["resources"]) == ("2", pods_of(NEW))


def test_the_next_control_process_goes_on_and_can_settle_as_well(serve: Serve) -> None:
    desired(serve.control(spec(2)), spec(2), NEW)
    rolling = dict(serve.asked)
    pools = serve.control(spec(2), NEW)
    assert serve.asked == rolling
    assert pools.settle("decode")
    assert serve.asked["resources"] == pods_of(OLD)


def test_what_has_succeeded_is_not_settled_any_more(serve: Serve) -> None:
    pools = serve.control(spec(2))
    desired(pools, spec(2), NEW)
    pools.confirm("decode")
    assert not pools.settle("decode")
    assert not serve.control(spec(2), NEW).settle("decode")


def test_a_pool_that_moves_to_other_pods_is_not_restarted_meanwhile(serve: Serve) -> None:
    pools = serve.control(spec(2))
    desired(pools, spec(2), NEW)
    with pytest.raises(ConfigError, match="other pods"):
        pools.restart("decode")
    pools.confirm("decode")
    pools.restart("decode")
    assert (serve.asked["version"], serve.asked["resources"]) == ("3", pods_of(NEW))


def test_a_pool_that_is_larger_than_it_may_be_any_more_comes_down_step_by_step_and_does_not_grow(
    serve: Serve,
) -> None:
    pools = serve.control(spec(1, scaling={"min": 1, "max": 4}))
    pools.scale("decode", 4)
    desired(pools, spec(1, scaling={"min": 1, "max": 2}), OLD)
    with pytest.raises(ConfigError, match=r"decode can have 2 replicas at most \(scaling.max\)"):
        pools.scale("decode", 5)
    pools.scale("decode", 3)
    assert (serve.asked["replicas"], pools.wanted("decode")) == (3, 3)
    with pytest.raises(ConfigError, match="at most"):
        pools.scale("decode", 4)
    pools.scale("decode", 2)
    assert pools.wanted("decode") == 2


def test_a_record_that_another_version_wrote_does_not_end_the_control_process(serve: Serve) -> None:
    serve.control(spec(2))
    ((key, raw),) = serve.kept.items()
    serve.kept[key] = raw.replace(rb"{\"version\":", rb"{\"unheard_of\":1,\"version\":")
    assert serve.kept[key] != raw
    serve.control(spec(2))
    assert serve.asked["version"] == "1"


def test_a_new_start_forgets_why_the_previous_replica_did_not_start(serve: Serve) -> None:
    pools = serve.control(spec(2))
    assert serve.forgotten == [("kvasir", "decode")]
    pools.restart("decode")
    assert serve.forgotten == [("kvasir", "decode")] * 2


def test_a_pool_that_does_not_serve_has_the_reason_of_its_replica(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = serve.control(spec(2))
    failure = StartFailure("no memory", "lower x", permanent=True, log="/l")
    monkeypatch.setattr(
        ray_pools, "read_failure", lambda *of: failure if of == ("kvasir", "decode") else None
    )
    (status,) = pools.status()
    assert (status.message, status.remedy, status.log) == ("no memory", "lower x", "/l")
    assert status.failed
