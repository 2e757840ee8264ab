"""How a follower node of an engine gets its rank and its part of a pod."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.config.load.loader import loads
from kvasir.config.spec.deployment import Deployment, WorkerSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.apps.follower_node import lead
from kvasir_platform.apps.worker_node import main, worker_view
from kvasir_workers.engines.vllm.follower import follow

OVER_TWO = """
disaggregation: never
pools:
  - {name: wide, role: both, engine: {tensor_parallel_size: 4, nodes: 2}}
"""


def test_the_first_node_is_found_at_the_address_of_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_POD_IP", "127.0.0.7")
    place = lead(Deployment(worker=WorkerSpec(host="pod")))
    assert (place.rank, place.address, place.leader) == (0, "127.0.0.7", "127.0.0.7")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_none_at_which_a_node_could_be_found(host: str) -> None:
    with pytest.raises(ConfigError, match=r"worker\.host: .* set pod"):
        lead(Deployment(worker=WorkerSpec(host=host)))


def test_ranks_share_the_cpus_of_their_own_pod() -> None:
    view = worker_view(loads(OVER_TWO, "t.yaml"), "wide", 8, alone=True)
    assert view.pool("wide").engine.threads == 4


def test_a_worker_outside_ray_has_no_one_to_place_its_other_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    spec = tmp_path / "kvasir.yaml"
    spec.write_text(OVER_TWO)
    assert main(["--deployment", str(spec), "--pool", "wide"]) == 2
    assert "pools.wide.engine.nodes: Ray places the nodes" in capsys.readouterr().err


async def test_nodes_of_one_engine_that_choose_different_transfers_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir_platform.apps.follower_node.rdma_ports", lambda: ("mlx5_0:1",))
    monkeypatch.setenv("KVASIR_POD_IP", "127.0.0.7")
    spec = loads("transfer: {host: 10.0.0.7}\n" + OVER_TWO.replace("never", "auto"), "t.yaml")
    first = lead(spec.model_copy(update={"worker": WorkerSpec(host="pod")}))
    assert first.transfer == "nixl"
    with pytest.raises(ConfigError, match=r"node 1 of pool wide uses nccl, and the engine's first node nixl"):
        await follow(spec, spec.pools[0], replace(first, rank=1), model_path="/nowhere")
