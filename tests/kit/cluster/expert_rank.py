"""One rank of a group whose experts vLLM's load balancer moves, on the CPU.

    python -m tests.kit.cluster.expert_rank RANK RANKS STORE SPEC

SPEC is JSON: `loads` by layer and expert, and `copies`, how many redundant experts there are. Prints as JSON
the expert that each of the rank's places has afterwards, by layer, as its weights say and as the plan says.
"""

from __future__ import annotations

import json
import sys
from typing import Any

HIDDEN = 16


def main(rank: int, ranks: int, store: str, spec: dict[str, Any]) -> None:
    """Plan from the loads, move the weights, and print what is where."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.eplb import eplb_communicator
    from vllm.distributed.eplb.policy import EPLB_POLICIES
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    # It asks vLLM's own groups, which this process has not, whether to log.
    eplb_communicator.is_local_first_rank = lambda: False
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    loads = torch.tensor(spec["loads"])
    layers, experts = loads.shape
    places = experts + spec["copies"]
    each = places // ranks
    before = (torch.arange(places) % experts).repeat(layers, 1)
    policy = EPLB_POLICIES["default"]
    after = policy.rebalance_experts(loads, places, 1, 1, ranks, before)
    mine = before[:, rank * each : (rank + 1) * each]
    weights = [
        [mine[layer].float()[:, None].repeat(1, HIDDEN), mine[layer].float()[:, None].repeat(1, 2 * HIDDEN)]
        for layer in range(layers)
    ]
    buffer = [torch.zeros_like(weight) for weight in weights[0]]
    group = dist.group.WORLD
    communicator = eplb_communicator.TorchDistNcclEplbCommunicator(group)
    rearrange_expert_weights_inplace(before, after, weights, buffer, group, communicator)
    held = [[weight.unique(dim=1).squeeze(1).int().tolist() for weight in layer] for layer in weights]
    planned = after[:, rank * each : (rank + 1) * each].tolist()
    sys.stdout.write(json.dumps({"held": held, "planned": planned}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
