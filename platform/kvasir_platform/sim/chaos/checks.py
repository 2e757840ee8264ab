"""The promises of a history, checked at its end: streams are complete, and all processes have recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import UpstreamError
from kvasir.core.kv import KvState
from kvasir_platform.sim.chaos.workload import expected
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster

RECOVERED_S = 15.0


def broken_streams(
    deployment: Deployment, streams: Iterable[ClientStream], cut: frozenset[str]
) -> Iterator[str]:
    """Return what is wrong with these streams, which have ended. Request ids in `cut` were cut off by their
    clients or with their router: their output must be correct, but may be incomplete. The same holds for
    streams that could not continue on another worker and whose error says so."""
    for stream in streams:
        request_id = stream.request.request_id
        summary = stream.summary
        if stream.broken:
            yield stream.broken
        elif request_id in cut:
            yield from _wrong(deployment, stream, whole=False)
        elif summary is None:
            yield f"{request_id} never ended"
        elif stream.error is None:
            yield from _wrong(deployment, stream, whole=True)
        elif isinstance(stream.error, UpstreamError) and _cannot_go_on(stream):
            yield from _wrong(deployment, stream, whole=False)
        else:
            yield f"{request_id} ended with {stream.error.code}: {stream.error.message}"


def _cannot_go_on(stream: ClientStream) -> bool:
    """Whether no other worker could continue the stream exactly."""
    sampling = stream.request.sampling
    penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    unrepeatable = sampling.temperature > 0 and sampling.seed is None and (penalised or sampling.n > 1)
    return unrepeatable and any(stream.tokens)


def _wrong(deployment: Deployment, stream: ClientStream, *, whole: bool) -> Iterator[str]:
    request = stream.request
    answers = expected(deployment, request, deployment.pools[-1].name)
    for index, answer in enumerate(answers):
        tokens, text = tuple(stream.tokens[index]), stream.texts[index]
        choice = f"{request.request_id} choice {index}"
        if whole and (tokens != answer.tokens or text != answer.text):
            yield f"{choice}: {_difference(tokens, answer.tokens, text, answer.text)}"
        elif tokens != answer.tokens[: len(tokens)] or not answer.text.startswith(text):
            yield f"{choice} is not the beginning of its answer"
    if whole and stream.last is not None:
        usage = stream.last.usage
        counts = (len(request.tokens), sum(len(answer.tokens) for answer in answers))
        if usage is None or (usage.prompt_tokens, usage.output_tokens) != counts:
            yield f"{request.request_id}: usage {usage}, but {counts} were read and written"


def _difference(tokens: tuple[int, ...], right: tuple[int, ...], text: str, right_text: str) -> str:
    if tokens == right:
        return f"text {text!r}, not {right_text!r}"
    at = next((at for at, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), None)
    return f"{len(tokens)} tokens of {len(right)}" if at is None else f"token {at} is wrong"


async def recovered(cluster: Cluster) -> str:
    """Wait until every router uses every worker and knows its blocks; return "" or what is missing after
    RECOVERED_S."""
    deadline = cluster.clock.now() + RECOVERED_S
    while missing := _missing(cluster):
        if cluster.clock.now() >= deadline:
            return f"{RECOVERED_S:g} s after the last fault: {missing}"
        await cluster.clock.sleep(0.25)
    return ""


def _missing(cluster: Cluster) -> str:
    for router_id, each in cluster.routers.items():
        views = {view.worker_id: view for view in each.router.workers()}
        for worker_id in cluster.workers:
            view = views.get(worker_id)
            if view is None or view.state != "ready":
                return f"{router_id} sees {worker_id} as {view.state if view else 'unknown'}"
            if view.kv is not None and view.kv.state is not KvState.EXACT:
                return f"{router_id} has {worker_id}'s blocks as {view.kv.state}: {view.kv.reason}"
    return ""
