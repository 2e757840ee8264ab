"""A tenant sends prompts that another tenant has sent, to find out from TTFT or usage whether they are
cached. There must be no signal: from engines, from tiers, across prefill and decode, or from embeddings. Real
vLLM.

The victim sends each prompt first. The prober sends these and as many that were never sent, in random order,
each once. That the victim's own second request differs from a first one proves that a cache hit is
detectable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
from tests.kit.lab.load import quantile
from tests.kit.lab.stream import Ask, complete

from kvasir.config.spec.deployment import (
    CpuTierSpec,
    Deployment,
    EngineSpec,
    FurtherModelSpec,
    PoolSpec,
    TenancySpec,
    TenantSpec,
    TiersSpec,
)
from kvasir.core.kv import Medium
from kvasir.core.requests import Role
from kvasir_platform.gateway.identity.keys import KeyEntry, hash_of, key_line, new_key
from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.clients.http_cases import read_answer
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial
from load_tests.scenarios.scorecard.real_engines import Stage
from load_tests.scenarios.scorecard.security import kolmogorov

PROMISE = "no signal"
ALPHA = 0.01
EMBEDS = "vectors"
VICTIM, PROBER, FRIEND, GUEST, OPERATOR = "victim", "prober", "friend", "guest", "operator"
_GROUP = "shared:lab"
_CACHES = {FRIEND: _GROUP, GUEST: _GROUP}
_VOCABULARY = (300, 4000)
_PATIENCE_S = 60.0
_KV_BYTES = 512 << 20
"""Holds several batches, so that a prompt that is sent again is still cached."""
_TIER_KV_BYTES = 12 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """Number of probed prompts, with as many controls: on one worker, of embeddings, and handed off between
    two workers with a tier. Prompts have `tokens` tokens and are sent `batch` at a time; of each batch the
    victim sends `again` prompts a second time."""

    prompts: int = 500
    embeddings: int = 150
    handed: int = 100
    tokens: int = 512
    batch: int = 10
    again: int = 3
    shared: int = 5


@dataclass(slots=True)
class Seen:
    """Seconds to the first token or to the answer, and cached tokens according to usage."""

    probes: list[float] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    found_by_prober: int = 0
    found_by_victim: int = 0


Once = Callable[[str, tuple[int, ...]], Awaitable[tuple[float, int]]]
"""Sends a prompt as a tenant; returns the seconds it took and the number of cached tokens."""


@dataclass(slots=True)
class Parties:
    """Tenants with API keys at one gateway."""

    stage: Stage
    keys: dict[str, str]
    rng: Random
    tokens: int

    def prompt(self, tokens: int = 0) -> tuple[int, ...]:
        """Return a prompt that was never sent."""
        return tuple(self.rng.randrange(*_VOCABULARY) for _ in range(tokens or self.tokens))

    async def first_token(self, tenant: str, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Stream one token; return TTFT and cached tokens. Raise NotProven if there is none."""
        ask = Ask(prompt, 1, headers=(f"Authorization: Bearer {self.keys[tenant]}",))
        outcome = await complete(self.stage.address, ask, self.stage.clock)
        if outcome.error or outcome.usage is None:
            raise NotProven(f"{tenant} was not answered: {outcome.error} {outcome.detail}")
        return outcome.ttft_s, _cached(outcome.usage)

    async def embedding(self, tenant: str, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Request one embedding; its usage has no cached tokens."""
        began = self.stage.clock.now()
        await self.post(tenant, "/v1/embeddings", {"model": EMBEDS, "input": prompt})
        return self.stage.clock.now() - began, 0

    async def cached(self, tenant: str, prompt: tuple[int, ...], salt: str = "") -> int:
        """Return the cached tokens in a tenant's usage, optionally with a salt."""
        body = {"model": "kvasir-tiny", "prompt": prompt, "max_tokens": 1}
        answer = await self.post(tenant, "/v1/completions", body | ({"cache_salt": salt} if salt else {}))
        return _cached(answer["usage"])

    async def post(self, tenant: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer. Raise NotProven for an error."""
        host, _, port = self.stage.address.rpartition(":")
        data = msgspec.json.encode(body)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                head = f"POST {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {self.keys[tenant]}\r\n"
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                answer = await read_answer(reader)
        finally:
            writer.close()
        if answer.status != 200:
            raise NotProven(f"{tenant} was answered {answer.status}: {answer.body[:200]!r}")
        found: dict[str, Any] = msgspec.json.decode(answer.body)
        return found


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    keys = {tenant: new_key() for tenant in (VICTIM, PROBER, FRIEND, GUEST, OPERATOR)}
    file = trial.folder / "keys"
    file.write_text("\n".join(key_line(hash_of(key), KeyEntry(tenant)) for tenant, key in keys.items()))
    file.chmod(0o600)
    figures = await _on_one_worker(trial, size, keys, str(file))
    return figures + await _over_two_workers(trial, size, keys, str(file))


def with_tenants(deployment: Deployment, keys_file: str, **changes: Any) -> Deployment:
    """A deployment that requires API keys."""
    tenants = tuple(
        TenantSpec(name=name, cache=_CACHES.get(name, "own"), operator=name == OPERATOR)
        for name in (VICTIM, PROBER, FRIEND, GUEST, OPERATOR)
    )
    edge = deployment.gateway.model_copy(update={"api_keys_file": keys_file})
    return deployment.model_copy(update={"gateway": edge, "tenancy": TenancySpec(tenants=tenants)} | changes)


async def _on_one_worker(trial: Trial, size: Size, keys: dict[str, str], keys_file: str) -> list[Figure]:
    engine = real_engines.engine(_KV_BYTES)
    whole = real_engines.together(engine)
    vectors = FurtherModelSpec(name=EMBEDS, dtype="float32", max_model_len=2048)
    pool = PoolSpec(name=EMBEDS, role=Role.EMBED, model=EMBEDS, engine=engine)
    spec = with_tenants(whole, keys_file, models=(vectors,), pools=(*whole.pools, pool))
    folder = trial.folder / "one"
    folder.mkdir()
    trial.say("an engine that generates and one that makes embeddings are starting")
    async with real_engines.stage(folder, spec, ("both", EMBEDS), key=keys[OPERATOR]) as stage:
        parties = Parties(stage, keys, trial.rng(1), size.tokens)
        figures = _figures(
            "one worker", await _probed(trial, parties, size, size.prompts, parties.first_token)
        )
        figures += await _shared(parties, size)
        seen = await _probed(trial, parties, size, size.embeddings, parties.embedding)
    return figures + _figures("embeddings", seen, by_usage=False)


async def _over_two_workers(trial: Trial, size: Size, keys: dict[str, str], keys_file: str) -> list[Figure]:
    """With so little KV on the device that a batch is found in the tier, or not at all."""
    apart = real_engines.apart(tiers=TiersSpec(cpu=CpuTierSpec(bytes=256 << 20)))
    spec: EngineSpec = real_engines.engine(_TIER_KV_BYTES)
    pools = tuple(pool.model_copy(update={"engine": spec}) for pool in apart.pools)
    folder = trial.folder / "two"
    folder.mkdir()
    trial.say("two engines with a tier are starting")
    deployment = with_tenants(apart, keys_file, pools=pools)
    async with real_engines.stage(folder, deployment, ("prefill", "decode"), key=keys[OPERATOR]) as stage:
        parties = Parties(stage, keys, trial.rng(2), size.tokens)
        seen = await _probed(trial, parties, size, size.handed, parties.first_token)
        loaded = sum(
            tier["loaded_blocks"]
            for load in await stage.loads("prefill")
            for tier in load.get("tiers", ())
            if tier["medium"] == Medium.CPU
        )
    if not loaded:
        raise NotProven("nothing was read from the tier")
    return _figures("prefill and decode apart, with a tier", seen, note=f"{loaded} blocks came from the tier")


async def _probed(trial: Trial, parties: Parties, size: Size, prompts: int, once: Once) -> Seen:
    """Probe that many prompts. The first round warms up and is discarded."""
    await _batch(parties, size, once, Seen())
    seen = Seen()
    while len(seen.probes) < prompts:
        await _batch(parties, size, once, seen)
        if len(seen.probes) % 100 == 0:
            trial.say(f"{len(seen.probes)} of {prompts} were probed")
    return seen


async def _batch(parties: Parties, size: Size, once: Once, seen: Seen) -> None:
    asked = [parties.prompt() for _ in range(size.batch)]
    for prompt in asked:
        await once(VICTIM, prompt)
    work = [(prompt, seen.probes) for prompt in asked]
    work += [(parties.prompt(), seen.controls) for _ in range(size.batch)]
    parties.rng.shuffle(work)
    for prompt, times in work:
        took, cached = await once(PROBER, prompt)
        times.append(took)
        seen.found_by_prober += cached
    for prompt in parties.rng.sample(asked, size.again):
        took, cached = await once(VICTIM, prompt)
        seen.again.append(took)
        seen.found_by_victim += cached > 0


async def _shared(parties: Parties, size: Size) -> list[Figure]:
    """Prompts found within a cache group, and by tenants outside of it."""
    found = strangers = salted = 0
    for _ in range(size.shared):
        prompt = parties.prompt()
        await parties.cached(FRIEND, prompt)
        found += await parties.cached(GUEST, prompt) > 0
        strangers += await parties.cached(PROBER, prompt)
        salted += await parties.cached(GUEST, prompt, salt="my own")
    return [
        Figure("prompts found within a group that shares", found, "prompts", "higher", size.shared,
               f"of {size.shared}"),
        Figure("cached tokens found in a group by others, and by its own under a salt", strangers + salted,
               "tokens", "lower", 0.0),
    ]  # fmt: skip


def _figures(what: str, seen: Seen, *, by_usage: bool = True, note: str = "") -> list[Figure]:
    """Return the figures. Raise NotProven if even the victim's own second request looks like a first one."""
    verdict = kolmogorov.compare(seen.probes, seen.controls)
    control = kolmogorov.compare(seen.again, seen.controls)
    if by_usage and seen.found_by_victim < len(seen.again):
        raise NotProven(f"{what}: the victim found {seen.found_by_victim} of {len(seen.again)} prompts again")
    if control.p > ALPHA or quantile(seen.again, 0.5) >= quantile(seen.controls, 0.5):
        raise NotProven(f"{what}: a hit cannot be distinguished from a miss either, p = {control.p:.2g}")
    medians = [quantile(times, 0.5) * 1e3 for times in (seen.probes, seen.controls, seen.again)]
    reported = (f"n = {len(seen.probes)} each, D = {verdict.distance:.3f}; median {medians[0]:.1f} ms, of "
            f"prompts never asked {medians[1]:.1f} ms; the victim's own again {medians[2]:.1f} ms, "
            f"p = {control.p:.1g} of {len(seen.again)}")  # fmt: skip
    figures = [
        Figure(f"{what}: p that the prober's times are of one distribution", verdict.p, "p", "higher", ALPHA,
               "; ".join(filter(None, (reported, note)))),
    ]  # fmt: skip
    if by_usage:
        again = f"the victim found {seen.found_by_victim} of {len(seen.again)} of its own"
        figures.append(
            Figure(f"{what}: cached tokens of others", seen.found_by_prober, "tokens", "lower", 0.0, again)
        )
    return figures


def _cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
