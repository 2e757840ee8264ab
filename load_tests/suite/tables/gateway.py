"""What is measured of the gateway and its parts."""

from __future__ import annotations

from load_tests.suite.scenario import ANY, Scenario, names
from load_tests.suite.tables.paths import FUNCTION, GATEWAY, MODULE, MODULES, NATIVE, ROUTER, measuring

_SIZES = ("100 B", "16 KiB", "128 KiB")
_REQUESTS = (*_SIZES, "128 KiB, warm", "100 B, alone")
_OURS = ("", ", kvasir-apart", ", kvasir-up")
_PEERS = (", haproxy", ", nginx", ", sglang-router", ", vllm-router", ", dynamo")
_DELTAS = (1, 8, 32, 128)
_RSS = ("rss, after the run", "rss, before any block", "rss, of a block", "rss, with its child processes")

_TOKENIZING_ROWS = (
    *names("{part}, {size}, cold", size=_SIZES, part=("prompt", "tokens")),
    *names("{part}, 128 KiB, warm", part=("prompt", "tokens")),
    "load and prove",
    "memory of a tokenizer",
)
_EDGE_ROWS = (
    *names("request, {size}", size=_SIZES),
    *names("chunk, {deltas} deltas a step", deltas=_DELTAS),
    "peak memory",
)
_PATH = (
    *names("request, {size}", size=_REQUESTS),
    *names("chunk, {deltas} deltas a message", deltas=_DELTAS),
    "ttft, added",
    *names("request, {size}, kvasir-apart", size=_REQUESTS),
    *names("chunk, {deltas} deltas a message, kvasir-apart", deltas=_DELTAS),
    "ttft, added, kvasir-apart",
)

TOKENIZING = Scenario(
    "tokenizing",
    "make bench-tokenizing",
    "load_tests.scenarios.tokenizing",
    _TOKENIZING_ROWS,
    (
        "platform/kvasir_platform/gateway/prompt/**/*.py",
        "platform/kvasir_platform/gateway/openai/**/*.py",
        *NATIVE,
        *measuring("scenarios/tokenizing.py", "vocabulary.py"),
    ),
    lines=FUNCTION,
    minutes=3,
)

EDGE = Scenario(
    "edge",
    "make bench-edge",
    "load_tests.scenarios.edge",
    _EDGE_ROWS,
    (*GATEWAY, *measuring("scenarios/edge.py"), "tests/kit/gateway/scripted_router.py"),
    lines=MODULES,
    minutes=2,
)

EDGE_LINK = Scenario(
    "edge_link",
    "make bench-edge-link",
    "load_tests.scenarios.edge_link",
    (
        *names("request, 100 B, {process}", process=("one process", "core", "edge")),
        *names(
            "chunk, {deltas} deltas a step, {process}",
            deltas=_DELTAS,
            process=("one process", "core", "edge"),
        ),
        "memory of an edge",
    ),
    (*GATEWAY, "platform/kvasir_platform/edge/**/*.py", *measuring("scenarios/edge_link.py")),
    lines=MODULES,
    minutes=3,
)

BOUNDS = Scenario(
    "bounds",
    "make bench-bounds",
    "load_tests.scenarios.gateway.bounds",
    (
        "event loop, costliest body that is accepted",
        "event loop, costliest body that is refused",
        "event loop, 7.8 MB of empty arrays, until it is refused",
        "event loop, 8 MiB of text, longest piece",
        "mask, accepted: a{0,100000}",
        "mask, accepted: (a{0,7}){0,7}b",
        r"mask, accepted: [a-z]+( [a-z]+)*\.",
        "mask, accepted: (a?b?)*c",
        "mask, accepted: .{0,50}a.{0,50}",
        "mask, accepted: ([^,]+, )*[^,]+",
        "mask, refused: ((a{0,1000}){0,1000}){0,1000}",
        "mask, refused: ((a*)*)*",
        "mask, refused: (a{0,20}){0,20}b{0,500}",
        r"mask, refused: ([a-z]+ ?)+\.",
    ),
    (
        "platform/kvasir_platform/gateway/http/**/*.py",
        "platform/kvasir_platform/gateway/openai/**/*.py",
        *NATIVE,
        *measuring("scenarios/gateway/bounds.py"),
        "tests/kit/lab/costly_bodies.py",
    ),
    lines=MODULE,
    minutes=4,
)

WHOLE = Scenario(
    "gateway",
    "make bench-gateway",
    "load_tests.scenarios.gateway",
    (
        *names("request, {size}{system}", size=_REQUESTS, system=(*_OURS, *_PEERS)),
        *names(
            "chunk, {deltas} deltas a message{system}",
            deltas=_DELTAS,
            system=(*_OURS, ", kvasir-no-fast-path", *_PEERS),
        ),
        *names(
            "whole request, {streams} streams a step{system}",
            streams=(8, 32, 128),
            system=(*_OURS, *_PEERS),
        ),
        *names("ttft, added{system}", system=(*_OURS, *_PEERS)),
        *names(
            "observability, {what}, {kind}",
            what=("100 B", "chunk, 32"),
            kind=("default", "traced", "control"),
        ),
        "console, 200 workers and 10,000 streams",
        "console, 200 workers and 10,000 streams, 5 viewers",
        "console, until the first view",
        "fleet, 8 idle workers",
        "fleet, 64 idle workers",
        "fleet, metrics of 200 workers, the longest wait of others",
        "https, request, 100 B",
        *names("https, chunk, {deltas} deltas a message", deltas=_DELTAS[1:]),
        *names("{row}{system}", row=_RSS, system=("", ", kvasir-up")),
        "configuration",
    ),
    (*GATEWAY, *ROUTER, *measuring("scenarios/gateway/**/*.py", "client.py")),
    lines=MODULES,
    minutes=50,
    optional=(f"not measured: {ANY}",),
)

INSTRUCTIONS = Scenario(
    "instructions",
    "make bench-instructions",
    "load_tests.scenarios.instructions",
    (
        *names("request, {size}", size=(*_SIZES, "128 KiB, warm")),
        *names("observability, 100 B, {kind}", kind=("default", "control")),
    ),
    (*GATEWAY, *ROUTER, *measuring("scenarios/instructions/*.py", "scenarios/gateway/**/*.py")),
    lines=MODULES,
    minutes=25,
)
PAIRED = Scenario(
    "paired",
    "make bench-paired BASE=COMMIT",
    "load_tests.scenarios.paired",
    (
        *names("{part}: {row}", part=("routers", "control"), row=_PATH),
        *names("gateway: {row}", row=_RSS),
        *names("edge: {row}", row=_EDGE_ROWS),
        *names("tokenizing: {row}", row=_TOKENIZING_ROWS),
        f"index: {ANY}",
    ),
    (*GATEWAY, *ROUTER, *measuring("scenarios/paired.py", "scenarios/gateway/**/*.py")),
    lines=MODULES,
    minutes=60,
    arguments=("{base}",),
    needs=("base",),
    optional=(f"gateway: {ANY}",),
)

_FRAMEWORKS = (
    "LangChain, standard tests, OpenAI",
    "LangChain, standard tests, Anthropic",
    "OpenAI Agents SDK",
    "Pydantic AI",
    "LiteLLM",
)
_RESULTS = ("passed", "refused", "failed")

FRAMEWORKS = Scenario(
    "frameworks",
    "make frameworks-check",
    "load_tests.scenarios.frameworks",
    names(f"{{suite}} {ANY}, scripted model: {{what}}", suite=_FRAMEWORKS, what=_RESULTS),
    (*GATEWAY, *measuring("scenarios/frameworks/*.py"), "tests/e2e/frameworks/suites/*.py"),
    lines=MODULES,
    minutes=8,
    optional=names(f"{{suite}} {ANY}, kvasir-tiny: {{what}}", suite=_FRAMEWORKS, what=_RESULTS),
)
