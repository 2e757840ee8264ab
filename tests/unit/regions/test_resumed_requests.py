"""A request that begins after output that its client has, in the production router with simulated engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.core.requests import Request, Resumed, Sampling, token_ids
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import simulate, small_deployment
from kvasir_workers.engines.sim.model import SimModel

SAMPLING = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)


def beginning(stream: ClientStream, tokens: int) -> Resumed:
    """What a client has that has seen so many tokens of a stream."""
    seen = tuple(stream.tokens[0][:tokens])
    return Resumed(seen, sum(len(SimModel().text(each)) for each in seen))


@pytest.mark.parametrize("had", [1, 17, 39])
@pytest.mark.parametrize("kind", ["always", "never"])
def test_it_goes_on_with_the_next_token_and_counts_the_whole(had: int, kind: str) -> None:
    spec = small_deployment(1, 1) if kind == "always" else small_deployment(0, 0, 1, disaggregation="never")

    async def story(cluster: Cluster) -> None:
        whole = cluster.submit(range(70), SAMPLING)
        await whole.finished()
        request = Request("resumed", spec.model.name, token_ids(range(70)), SAMPLING)
        resumed = beginning(whole, had)
        rest = ClientStream(replace(request, resumed=resumed, arrival_s=cluster.clock.now()))
        rest.tokens[0] = list(resumed.tokens)
        cluster.router.submit(rest.request, rest)
        summary = await rest.finished()
        assert rest.tokens == whole.tokens
        assert rest.texts[0] == whole.texts[0][resumed.characters :]
        assert (summary.usage.prompt_tokens, summary.usage.output_tokens) == (70, 40)
        assert rest.last is not None
        assert rest.last.usage == summary.usage

    simulate(spec, story)


def test_it_survives_the_loss_of_its_worker_as_any_other() -> None:
    async def story(cluster: Cluster) -> None:
        whole = cluster.submit(range(70), SAMPLING)
        await whole.finished()
        request = Request("resumed", cluster.deployment.model.name, token_ids(range(70)), SAMPLING)
        resumed = beginning(whole, 5)
        rest = ClientStream(replace(request, resumed=resumed, arrival_s=cluster.clock.now()))
        rest.tokens[0] = list(resumed.tokens)
        cluster.router.submit(rest.request, rest)
        await rest.started.wait()
        view = cluster.router.running_request("resumed")
        assert view is not None
        lost = view.so_far.decode_worker
        assert lost is not None
        await cluster.kill(lost)
        await cluster.forget(lost)
        summary = await rest.finished()
        assert summary.migrations == 1
        assert rest.tokens == whole.tokens
        assert summary.usage.output_tokens == 40

    simulate(small_deployment(1, 2), story)
