"""The options of `kvasir plan`. Every call of `kvasir` imports this module, so it loads little."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvasir_platform.cli.common.numbers import positive, share, whole

PLAN_EPILOG = """\
Computes what to run for a load before anything is bought: whether the model fits and where memory goes, the
parallel layout, prefill and decode together or apart, replicas for the mean and the peak, TTFT and ITL with
error bars, and the cost by the hour and by the million tokens. MODEL is a folder, a Hugging Face id, or one
of the shapes that Kvasir knows without a network, such as llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b,
gpt-oss-120b, deepseek-v3 and bge-m3.

The SLO is met by `attainment` of the requests (0.95). Times follow from data sheets, with wide error bars,
unless --profile names measurements. Prices are list prices of cloud providers: --catalogue replaces them.

examples:
  kvasir plan llama-3.1-8b --rate 10 --prompt-tokens 1500/4000 --output-tokens 250 --slo ttft=1,itl=0.04
  kvasir plan meta-llama/Llama-3.1-70B-Instruct --workload chat:rate=20 --gpus H100:16,L40S:32
  kvasir plan llama-3.1-70b --rate 5 --explain          every step of the arithmetic
  kvasir plan qwen3-8b --rate 5 --advice                which GPU, which layout, which optimisation pays
  kvasir plan qwen3-8b --gpus H100,L4 --batches         tokens/s, bottleneck and price by batch
  kvasir plan llama-3.1-8b --rate 5 --write plan        kvasir.yaml and Helm values in the folder plan
  kvasir plan bge-m3 --rate 200 --prompt-tokens 400     an embedding pool
  kvasir plan kvasir-tiny --gpus CPU:8 --rate 2         on CPUs, by the core"""

_COUNT = whole(1, 10_000_000)


@dataclass(frozen=True, slots=True)
class LengthOption:
    """A number of tokens: always the same, or a median and a 95th percentile."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class SloOption:
    """The promise, in seconds."""

    ttft: float = 2.0
    itl: float = 0.05
    attainment: float = 0.95


def add_plan_options(plan: argparse.ArgumentParser) -> None:
    """Add them."""
    plan.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a Hugging Face id, or a known shape"
    )
    plan.add_argument("--config", type=Path, metavar="FILE", help="a config.json in place of MODEL")
    _add_load(plan.add_argument_group("the load"))
    _add_choices(plan.add_argument_group("what plans may have"))
    _add_forms(plan.add_argument_group("the report"))


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        metavar="TEXT",
        help="a preset or trace, as chat:rate=20 or trace.jsonl:speed=2, in place of --rate and lengths",
    )
    group.add_argument("--rate", type=positive, metavar="N", help="requests per second on average (1)")
    group.add_argument(
        "--peak", type=positive, metavar="N", help="requests per second when it is busiest (twice --rate)"
    )
    group.add_argument(
        "--prompt-tokens", type=_length, metavar="N[/P95]", help="of a prompt, or its median and p95 (1000)"
    )
    group.add_argument("--output-tokens", type=_length, metavar="N[/P95]", help="of an output (250)")
    group.add_argument(
        "--prefix-share", type=share, metavar="X", help="part of a prompt that is in a cache, 0 to 1 (0)"
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        metavar="X",
        help="squared variation of the gaps between arrivals (1: independent users)",
    )
    group.add_argument(
        "--slo",
        type=_slo,
        default=SloOption(),
        metavar="KEY=S,…",
        help="ttft, itl in seconds, and attainment (ttft=2,itl=0.05,attainment=0.95)",
    )


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpus",
        metavar="NAME[:N],…",
        help="hardware and how many there are; CPU:N are cores (default: all GPUs with a price)",
    )
    group.add_argument("--catalogue", type=Path, metavar="FILE", help="GPUs and prices of your own (YAML)")
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help="measurements of `kvasir calibrate`, for their hardware"
    )
    group.add_argument(
        "--cautious", action="store_true", help="size with the slowest likely coefficients, not the middle"
    )
    group.add_argument(
        "--mode", choices=("auto", "aggregated", "disaggregated"), default="auto", help="default: auto"
    )
    group.add_argument(
        "--quantization",
        choices=("none", "fp8", "int8", "any"),
        default="none",
        help="of weights at load (none)",
    )
    group.add_argument("--kv-dtype", choices=("auto", "fp8", "any"), default="auto", help="of KV (auto)")
    group.add_argument(
        "--speculate", type=whole(0, 16), default=0, metavar="N", help="tokens to propose for each step (0)"
    )
    group.add_argument(
        "--acceptance", type=share, default=0.7, metavar="X", help="chance that one is accepted (0.7)"
    )
    group.add_argument(
        "--max-model-len", type=_COUNT, metavar="N", help="tokens of a request (the longest of the load)"
    )
    group.add_argument("--network-gbps", type=positive, metavar="N", help="between two replicas, for KV")


def _add_forms(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as -o json"
    )
    group.add_argument("--explain", action="store_true", help="every step of the arithmetic")
    group.add_argument(
        "--advice",
        action="store_true",
        help="which hardware in stages, which layout, and which optimisation pays",
    )
    group.add_argument(
        "--batches", action="store_true", help="throughput, bottleneck and price by hardware and batch"
    )
    group.add_argument(
        "--context", type=_COUNT, metavar="N", help="tokens of a user, for the table of memory (8192)"
    )
    group.add_argument("--write", type=Path, metavar="DIR", help="write DIR/kvasir.yaml and DIR/values.yaml")
    group.add_argument("--html", type=Path, metavar="FILE", help="write the report with charts as one page")
    group.add_argument(
        "--png", type=Path, metavar="FILE", help="draw cost against SLO (needs the extra `charts`)"
    )
    group.set_defaults(output=argparse.SUPPRESS)


def _length(text: str) -> LengthOption:
    median, slash, p95 = text.partition("/")
    first = _COUNT(median)
    last = _COUNT(p95) if slash else first
    if last < first:
        raise argparse.ArgumentTypeError(f"{text}: the 95th percentile is at least the median")
    return LengthOption(first, last)


def _slo(text: str) -> SloOption:
    found: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in ("ttft", "itl", "attainment"):
            raise argparse.ArgumentTypeError(f"{part}: ttft=SECONDS, itl=SECONDS or attainment=SHARE")
        found[key] = positive(value)
    if not 0.5 <= found.get("attainment", 0.95) < 1.0:
        raise argparse.ArgumentTypeError("attainment: from 0.5 to below 1")
    return SloOption(**found)
