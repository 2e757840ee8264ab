"""The steps of `kvasir verify` on a running deployment, which goes on serving its other clients.

Every prompt begins with a random word, so that nothing of it is in a cache. The reference for greedy tokens
is the same request run whole on one worker without its prefix cache, so that the path under test (prefill,
transfer, decode, or a prefix hit) is the only difference.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cli.common.gateway_client import decisions, status_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.verify.checks import (
    PredictionSample,
    VerifyCheck,
    at_rest,
    hardware_of,
    prediction_check,
    prediction_of,
    prefix_hit,
    same_tokens,
)
from kvasir_platform.cli.verify.client import VerifiedCompletion, VerifyClient
from kvasir_platform.cli.verify.curves import LoadPoint, measure_point
from kvasir_platform.cli.verify.limits import quality_checks
from kvasir_platform.cli.verify.quality import QualityOptions, measure_quality
from kvasir_platform.cli.verify.score_file import ScoredSet
from kvasir_platform.cli.verify.scores import QualityFigures

OUTPUT_TOKENS = 32
LOAD_PROMPT_TOKENS = 256
LOAD_OUTPUT_TOKENS = 64
REQUESTS_A_STREAM = 4
REST_S = 60.0
"""Leases of KV that nobody pulled last 20 s by default."""
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to measure: prompt lengths in tokens, numbers of concurrent streams (none: no load), the
    bandwidth of the link between workers in bytes per second, if known, and accuracy, if at all."""

    model: str | None = None
    prompt_tokens: tuple[int, ...] = (64, 512, 2048)
    streams: tuple[int, ...] = (1, 2, 4, 8)
    link_bytes_per_s: float | None = None
    timeout_s: float = 120.0
    quality: QualityOptions | None = None


@dataclass(frozen=True, slots=True)
class TransferSample:
    """The transfer of one prompt's KV between two workers."""

    prompt_tokens: int
    moved_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 if nothing was timed."""
        return self.moved_bytes / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Verification:
    """What was found. Times are in seconds. `scored` is what a later run compares its accuracy with."""

    deployment: str
    model: str
    disaggregation: str
    hardware: list[str]
    options: VerifyOptions
    began: str
    checks: list[VerifyCheck] = field(default_factory=list)
    transfers: list[TransferSample] = field(default_factory=list)
    predictions: list[PredictionSample] = field(default_factory=list)
    curve: list[LoadPoint] = field(default_factory=list)
    quality: QualityFigures | None = None
    scored: ScoredSet | None = None

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.result != "fail" for check in self.checks)


class Verifier:
    """Verifies the deployment at `site`; `say` receives a line for each step. Raises UpstreamError if the
    gateway does not answer or refuses a request, and ConfigError for options that do not fit the model."""

    def __init__(
        self,
        site: Site,
        options: VerifyOptions,
        say: Callable[[str], None],
        *,
        began: str,
        rng: random.Random,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._site = site
        self._options = options
        self._say = say
        self._rng = rng
        self._pause = pause
        status = status_of(site)
        if not status.get("ready"):
            raise UpstreamError(f"the deployment is not ready to serve: {status.get('reason')}")
        models = status["models"]
        model = options.model or models[0]
        if model not in models:
            raise ConfigError(f"--model {model}: this deployment serves {', '.join(models)}")
        self._client = VerifyClient(site, model, options.timeout_s)
        self._found = Verification(
            status["deployment"],
            model,
            status["disaggregation"],
            hardware_of(status["workers"]),
            options,
            began,
        )
        self._longest = 0

    def run(self) -> Verification:
        """Run all steps."""
        _, self._longest = self._client.tokenize("1")
        fitting = (each for each in self._options.prompt_tokens if each + OUTPUT_TOKENS < self._longest)
        lengths = sorted(fitting)
        if not lengths:
            raise ConfigError(
                f"--prompt-tokens: the model's context is {self._longest} tokens; name a prompt that leaves "
                f"{OUTPUT_TOKENS} for the output"
            )
        # The first transfer between two workers also opens their connection.
        self._client.complete(self._prompt(lengths[0]), 1)
        for length in lengths:
            again = self._answers(length)
        self._found.checks.append(prefix_hit(again, lengths[-1]))
        self._found.checks.append(prediction_check(self._found.predictions))
        if self._options.quality is not None:
            self._accuracy(self._options.quality)
        for streams in self._options.streams:
            self._load(streams)
        self._rest()
        return self._found

    def _answers(self, length: int) -> VerifiedCompletion:
        """Compare a prompt run as the router decides with the reference, twice. Return the second answer."""
        self._say(f"a prompt of {length:,} tokens, as routed and whole on one worker")
        prompt = self._prompt(length)
        routed = self._client.complete(prompt, OUTPUT_TOKENS)
        if routed.moved_bytes:
            self._found.transfers.append(TransferSample(length, routed.moved_bytes, routed.transfer_s))
        reference = self._client.complete(prompt, OUTPUT_TOKENS, whole=True)
        again = self._client.complete(prompt, OUTPUT_TOKENS)
        how = self._decided(routed)
        if how == "disaggregated" and not routed.moved_bytes:
            name = f"{length:,} tokens, {how}: KV was moved"
            self._found.checks.append(VerifyCheck(name, "fail", "the decode worker received no byte of it"))
        self._found.checks += [
            same_tokens(f"{length:,} tokens, {how}: as one worker alone", reference, routed),
            same_tokens(f"{length:,} tokens, repeated: as one worker alone", reference, again),
        ]
        return again

    def _decided(self, routed: VerifiedCompletion) -> str:
        """Return the mode of the decision, and keep its prediction."""
        record: dict[str, Any] = decisions(self._site, routed.request_id)["decisions"][0]
        if (sample := prediction_of(record)) is not None:
            self._found.predictions.append(sample)
        return str(record["mode"])

    def _accuracy(self, options: QualityOptions) -> None:
        name = f"{self._found.model} of {self._found.deployment}, {self._found.began}"
        figures, scored = measure_quality(self._client, name, options, self._longest, self._say)
        self._found.quality, self._found.scored = figures, scored
        self._found.checks += quality_checks(figures, options.limits)

    def _load(self, streams: int) -> None:
        requests = streams * REQUESTS_A_STREAM
        length = min(LOAD_PROMPT_TOKENS, self._longest // 2)
        output = min(LOAD_OUTPUT_TOKENS, self._longest // 4)
        self._say(f"{requests} requests, {streams} at a time, {length} tokens in and {output} out")
        prompts = [self._prompt(length) for _ in range(requests)]
        self._found.curve.append(
            measure_point(lambda number: self._client.stream(prompts[number], output), streams, requests)
        )

    def _rest(self) -> None:
        """Wait until the deployment has nothing unfinished."""
        self._say("waiting for workers to be at rest")
        unfinished = at_rest(status_of(self._site))
        for _ in range(int(REST_S / _POLL_S)):
            if unfinished is None:
                break
            self._pause(_POLL_S)
            unfinished = at_rest(status_of(self._site))
        self._found.checks.append(
            VerifyCheck(
                "no request, KV block or lease is left",
                "pass" if unfinished is None else "fail",
                unfinished or "all workers are at rest",
            )
        )

    def _prompt(self, length: int) -> Sequence[int]:
        """Return that many tokens of text that nobody has sent before."""
        text = f"{self._rng.getrandbits(64):016x}"
        tokens: list[int] = []
        words = length
        while len(tokens) < length:
            numbers = " ".join(str(self._rng.randrange(1000)) for _ in range(words))
            tokens, _ = self._client.tokenize(f"{text} {numbers}")
            words *= 2
        return tokens[:length]
