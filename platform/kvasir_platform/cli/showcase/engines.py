"""Experiments 3, 4, 5 and 7: prefix caching, speculation, one to eight GPUs, and sizes of models."""

from __future__ import annotations

from dataclasses import replace

from kvasir.hardware.gpus import GIB
from kvasir.performance.step import StepWork
from kvasir_platform.cli.showcase.bench import ShowcaseResult, Trial, option_of, play
from kvasir_platform.cli.sim.report import seconds
from kvasir_platform.reports.charts import LineChart, PlottedLine, bar_chart, line_chart
from kvasir_platform.sim.engine.options import BatchOptions, SpeculationOptions
from kvasir_platform.sim.server.results import ServerResult

_DOCUMENTS = "rag:rate=2,duration=120,prefixes=200,prefix=4096"
_CPU_BYTES = 200 * GIB
_RANKS = (1, 2, 4, 8)
_LOOKAHEADS = (0, 1, 2, 4, 6)
_ACCEPTANCES = (0.5, 0.7, 0.9)


def prefix_caching() -> ShowcaseResult:
    """Questions about documents, with and without a cache."""
    small = {"model": "llama-3.1-8b", "gpu": "L40S", "quantization": "fp8"}
    base = Trial(_DOCUMENTS, **small)  # type: ignore[arg-type]
    named = [
        ("no cache", play(replace(base, batch=BatchOptions(prefix_cache=False)))),
        ("on the GPU", play(base)),
        ("GPU and CPU memory", play(replace(base, cpu_bytes=_CPU_BYTES))),
    ]
    ttft = [result.quantiles(result.times.ttft_s) for _, result in named]
    finding = (
        f"Without a cache the median TTFT is {seconds(ttft[0][0])}. The GPU's spare KV memory finds "
        f"{named[1][1].hit_rate:.0%} of what an infinite cache would, for {seconds(ttft[1][0])}; with a tier "
        f"in CPU "
        f"memory it is {named[2][1].hit_rate:.0%} and {seconds(ttft[2][0])}."
    )
    return ShowcaseResult(
        "caching",
        "3. Prefix caching and TTFT",
        "What does a cache of KV save when prompts begin alike?",
        finding,
        ("cache", "TTFT p50", "TTFT p99", "hits of an infinite cache's", "prompt tokens computed"),
        tuple(
            (
                name,
                seconds(each[0]),
                seconds(each[2]),
                f"{result.hit_rate:.1%}",
                f"{sum(w.totals.prefilled_tokens for w in result.workers):,}",
            )
            for (name, result), each in zip(named, ttft, strict=True)
        ),
        (
            bar_chart(
                "TTFT",
                "ms",
                [name for name, _ in named],
                [("p50", [1e3 * each[0] for each in ttft]), ("p99", [1e3 * each[2] for each in ttft])],
            ),
        ),
        {"ttft_p50_s": {name: each[0] for (name, _), each in zip(named, ttft, strict=True)}},
    )


def speculation() -> ShowcaseResult:
    """Proposals of a small draft model, at a low and a high load."""
    few, many = "chat:rate=2,duration=20", "chat:rate=36,duration=20"
    runs = {
        (acceptance, lookahead): _speculate(few, acceptance, lookahead)
        for acceptance in _ACCEPTANCES
        for lookahead in _LOOKAHEADS
    }
    busy = {lookahead: _speculate(many, 0.7, lookahead) for lookahead in (0, 4)}
    plain, best = _itl(runs[0.7, 0]), min(_itl(runs[0.7, each]) for each in _LOOKAHEADS)
    finding = (
        f"With an acceptance of 0.7 the time per token falls from {seconds(plain)} to {seconds(best)} at a "
        f"low load, "
        f"where steps wait for memory. With {max(busy[0].utilization, 0.01):.0%} utilization at 36 "
        f"requests/s four "
        f"proposals change it from {seconds(_itl(busy[0]))} to {seconds(_itl(busy[4]))}."
    )
    rows = [
        (f"{lookahead}", *(seconds(_itl(runs[acceptance, lookahead])) for acceptance in _ACCEPTANCES))
        for lookahead in _LOOKAHEADS
    ]
    lines = tuple(
        PlottedLine(
            f"acceptance {acceptance:g}", tuple((x, 1e3 * _itl(runs[acceptance, x])) for x in _LOOKAHEADS)
        )
        for acceptance in _ACCEPTANCES
    )
    return ShowcaseResult(
        "speculation",
        "4. Speculation and ITL",
        "When do proposals make tokens come faster?",
        finding,
        ("proposals of a step", *(f"TPOT p50, acceptance {acceptance:g}" for acceptance in _ACCEPTANCES)),
        tuple(rows),
        (
            line_chart(
                LineChart("Time per token at 2 requests/s, draft at 5 % of a step", "proposals", "ms", lines)
            ),
        ),
        {"tpot_s": {"plain": plain, "best": best}},
    )


def several_gpus() -> ShowcaseResult:
    """Tensor parallelism over one to eight GPUs, with the cost of its exchanges."""
    model, load = "llama-3.1-8b", "chat:rate=10,duration=20"
    named = [(ranks, play(Trial(load, model, ranks=ranks))) for ranks in _RANKS]
    shares = []
    for ranks in _RANKS:
        step = option_of(Trial(load, model, ranks=ranks)).engine.step(StepWork(streams=32, context=1500.0))
        shares.append(step.communication_s / step.seconds)
    itl = [_itl(result) for _, result in named]
    cost = [result.dollars_per_million or 0.0 for _, result in named]
    finding = (
        f"Eight H100 make tokens {itl[0] / itl[-1]:.1f} times as fast as one, not eight times: exchanges "
        f"take "
        f"{shares[-1]:.0%} of a step, and fixed costs do not shrink. At this load a million tokens cost "
        f"${cost[0]:.2f} on one GPU and ${cost[-1]:.2f} on eight."
    )
    rows = [
        (
            f"{ranks}",
            seconds(_itl(result)),
            seconds(result.quantiles(result.times.ttft_s)[0]),
            f"{share:.0%}",
            f"${price:.2f}",
        )
        for (ranks, result), share, price in zip(named, shares, cost, strict=True)
    ]
    ideal = tuple((float(ranks), 1e3 * itl[0] / ranks) for ranks in _RANKS)
    lines = (
        PlottedLine("simulated", tuple((float(r), 1e3 * each) for r, each in zip(_RANKS, itl, strict=True))),
        PlottedLine("divided evenly", ideal),
    )
    return ShowcaseResult(
        "gpus",
        "5. One to eight GPUs",
        "How much faster is one engine on more GPUs, with the cost of communication?",
        finding,
        ("GPUs", "TPOT p50", "TTFT p50", "exchanges, of a step of 32 streams", "per million output tokens"),
        tuple(rows),
        (line_chart(LineChart("Time per token", "GPUs", "ms", lines)),),
        {"tpot_s": dict(zip(map(str, _RANKS), itl, strict=True))},
    )


def model_sizes() -> ShowcaseResult:
    """From 7B to 70B, in 16 bits and in INT8."""
    load = "chat:rate=3,duration=20,context=4000"
    cases = (
        ("7B", Trial(load, "llama-2-7b")),
        ("7B INT8", Trial(load, "llama-2-7b", quantization="int8")),
        ("8B GQA", Trial(load, "llama-3.1-8b")),
        ("70B", Trial(load, "llama-3.1-70b", ranks=4)),
        ("70B INT8", Trial(load, "llama-3.1-70b", ranks=2, quantization="int8")),
        ("INT8 on 4", Trial(load, "llama-3.1-70b", ranks=4, quantization="int8")),
    )
    named = [(name, trial, play(trial), option_of(trial)) for name, trial in cases]
    itl = {name: _itl(result) for name, _, result, _ in named}
    cost = {name: result.dollars_per_million or 0.0 for name, _, result, _ in named}
    finding = (
        f"A token of 70B on four GPUs takes {itl['70B'] / itl['8B GQA']:.1f} times as long as one of 8B "
        f"on one. "
        f"INT8 halves the weights: two GPUs do, and a million tokens cost ${cost['70B INT8']:.2f} and not "
        f"${cost['70B']:.2f}; on the same four GPUs a token takes {seconds(itl['INT8 on 4'])} and not "
        f"{seconds(itl['70B'])}."
    )
    rows = [
        (
            name,
            f"{trial.ranks}",
            f"{option.fit.weights / GIB:.1f} GiB",
            f"{option.fit.tokens:,}",
            seconds(_itl(result)),
            seconds(result.quantiles(result.times.ttft_s)[0]),
            f"${cost[name]:.2f}",
        )
        for name, trial, result, option in named
    ]
    return ShowcaseResult(
        "sizes",
        "7. From 7B to 70B, and INT8",
        "What do larger models cost, and what does quantization give back?",
        finding,
        (
            "model",
            "H100",
            "weights of a GPU",
            "tokens of KV",
            "TPOT p50",
            "TTFT p50",
            "per million output tokens",
        ),
        tuple(rows),
        (
            bar_chart(
                "Time per token", "ms", list(itl), [("TPOT p50", [1e3 * each for each in itl.values()])]
            ),
            bar_chart("Cost of a million output tokens", "$", list(cost), [("dollars", list(cost.values()))]),
        ),
        {"tpot_s": itl},
    )


def _speculate(load: str, acceptance: float, lookahead: int) -> ServerResult:
    options = SpeculationOptions(acceptance, lookahead, 0.05) if lookahead else None
    return play(Trial(load, batch=BatchOptions(speculation=options)))


def _itl(result: ServerResult) -> float:
    return result.quantiles(result.times.tpot_s)[0]
