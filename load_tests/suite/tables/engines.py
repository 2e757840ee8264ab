"""What is measured with real engines, and with the stack as a user starts it."""

from __future__ import annotations

from tests.kit.models.architectures import MODELS as TINY_MODELS

from load_tests.suite.scenario import ANY, Scenario, names
from load_tests.suite.tables.paths import (
    CLUSTER,
    ENGINES,
    FUNCTION,
    MODULE,
    MODULES,
    ROUTER,
    STACK,
    measuring,
)

FOUNDATION = Scenario(
    "foundation",
    "make bench-foundation",
    "load_tests.scenarios.foundation",
    (
        "first token, warm",
        "ttft cold",
        "ttft prefix hit",
        "cancel until the engine stopped",
        "cancel around the hand-off until both engines' KV is free, the longest",
        "tokens/s 1 stream",
        "tokens/s 16 streams",
        "idle cpu",
        "memory engine core",
        "memory replica",
        "memory router",
        "memory control",
        "memory in all",
    ),
    (*STACK, *measuring("scenarios/foundation.py", "engine_alone.py", "client.py")),
    lines=MODULES,
    minutes=5,
    optional=("first token, bare", f"memory {ANY}"),
)

_SESSIONS = names(
    ", {kind}, {pace}",
    pace=("one at a time", "6 sessions at once"),
    kind=("chats", "documents", "agents"),
)

PARITY = Scenario(
    "parity",
    "make bench-parity",
    "load_tests.scenarios.parity",
    (
        *names("all: {what}", what=("requests", "tokens")),
        *names(
            "{fleet}{sessions}: {what}",
            fleet=("apart", "whole, evicting"),
            sessions=("", *_SESSIONS),
            what=("requests", "tokens"),
        ),
    ),
    (
        "router/kvasir_router/index/**/*.py",
        "router/kvasir_router/fleet/**/*.py",
        "workers/kvasir_workers/engines/**/*.py",
        *measuring("scenarios/parity.py", "replays.py"),
    ),
    lines=MODULE,
    minutes=15,
)

TRUTH = Scenario(
    "truth",
    "make bench-truth",
    "load_tests.scenarios.truth",
    names(
        "{model}, {mode}: {figure}",
        model=("kvasir-tiny", "gemma3", "qwen3-moe"),
        mode=("aggregated", "apart"),
        figure=("TTFT", "ITL", "throughput"),
    ),
    (
        "platform/kvasir/performance/**/*.py",
        "platform/kvasir_platform/calibrate/**/*.py",
        "platform/kvasir_platform/cli/calibrate/**/*.py",
        *ENGINES,
        *measuring("scenarios/truth/*.py"),
        "tests/kit/sim/virtual_batching.py",
    ),
    lines=MODULE,
    minutes=15,
)

_THREADS = (
    "OMP_WAIT_POLICY default, 2 threads an engine",
    "OMP_WAIT_POLICY ACTIVE, 2 threads an engine",
    "OMP_WAIT_POLICY PASSIVE, 2 threads an engine",
    "OMP_WAIT_POLICY PASSIVE, 1 thread an engine",
)

THREADS = Scenario(
    "threads",
    "make bench-threads",
    "load_tests.scenarios.threads",
    names(
        "{streams}, {variant}: {figure}",
        variant=_THREADS,
        streams=("1 stream", "8 streams"),
        figure=("ITL p50", "ITL p99", "longest gap", "output"),
    ),
    (
        "workers/kvasir_workers/engines/**/*.py",
        *measuring("scenarios/threads/*.py", "scenarios/scorecard/real_engines.py"),
    ),
    lines=MODULE,
    minutes=15,
)

_SCALED = (
    "decision to serving",
    "one replica to three, from the load's rise",
    "three replicas to none, from the last answer",
    "first token of a model that slept",
    "answers that failed or were cut",
)

_VOLUME = ("a mount for each", "a mount for each, node_cache", "one mount for all")
_BUCKET = ("downloaded from a bucket first", "streamed from a bucket")

_REFUSED = (
    "Llama-3.1-70B on one H100",
    "DeepSeek-V3 on one H100",
    "a truncated shard of Llama-3.1-70B",
)

SCALING = Scenario(
    "scaling",
    "make bench-scaling",
    "load_tests.scenarios.scaling",
    (
        *names("{figure}, {engine}", engine=("sim", "vllm"), figure=_SCALED),
        f"engine start, {ANY} GB of weights, page cache cold, load.strategy lazy",
        f"engine start, {ANY} GB of weights, page cache cold, load.strategy prefetch",
        f"engine start, {ANY} GB of weights, after another worker of the node has read them",
        "engine start, kvasir-tiny, without compilation",
        "engine start, kvasir-tiny, compiled, nothing kept",
        "engine start, kvasir-tiny, compiled, code of an earlier start kept",
        *names(
            "3 workers of a node, {variant}: {figure}",
            variant=_VOLUME,
            figure=("read from the volume", "CPU of all", "until the last has its weights"),
        ),
        *names(
            "engine start, weights {variant}: {figure}",
            variant=("in the page cache", *_BUCKET),
            figure=("CPU", "until it has started"),
        ),
        *names(
            "engine start, weights {variant}: {figure}",
            variant=_BUCKET,
            figure=("read from the bucket", "left on the disk"),
        ),
        *names("kvasir check refuses {case}", case=_REFUSED),
    ),
    (
        *CLUSTER,
        "platform/kvasir_platform/planner/**/*.py",
        "workers/kvasir_workers/engines/vllm/setup/**/*.py",
        *measuring(
            "scenarios/scaling.py",
            "scenarios/start_up.py",
            "scenarios/sources/*.py",
            "scenarios/models/refused.py",
            "page_cache.py",
        ),
    ),
    lines=MODULE,
    minutes=35,
)

_SERVERS = ("mock", "mock at a rate", "kvasir")
_COMPARED = ("TTFT", "TPOT", "ITL", "E2E")
_RATES = ("output tokens/s", "requests/s")

AGREEMENT = Scenario(
    "agreement",
    "make bench-agreement",
    "load_tests.scenarios.agreement",
    (
        *names(
            "{server}: {figure} {part}, difference",
            server=_SERVERS,
            figure=_COMPARED,
            part=("mean", "p50", "p95"),
        ),
        *names("{server}: {rate}, difference", server=_SERVERS, rate=_RATES),
    ),
    (
        "platform/kvasir_platform/bench/**/*.py",
        *measuring("scenarios/agreement/*.py"),
        "tests/kit/openai_server*",
    ),
    lines=FUNCTION,
    minutes=20,
)

MODELS = Scenario(
    "models",
    "make bench-models",
    "load_tests.scenarios.models",
    names(f"{{model}}, {ANY}", model=(each.name for each in TINY_MODELS)),
    (*ENGINES, *ROUTER, "platform/kvasir/checkpoint/**/*.py", *measuring("scenarios/models/*.py")),
    lines=MODULES,
    minutes=75,
    arguments=("--again",),
)
