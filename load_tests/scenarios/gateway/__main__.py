"""The gateway path, end to end: CPU of a request and of a streamed chunk, added TTFT, and memory.

Kvasir is the router process that `make up` starts, with all its defaults: a tokenizer of realistic size, API
keys, a tenant's limits, admission, decision records, metrics and a filled index, in front of scripted workers
over real gRPC, each of which runs whole requests. In the rows of `kvasir-apart` half of the workers prefill
and half of them decode; those of `kvasir-up` are what `kvasir up` starts, which presents certificates and a
token on each session as well; in those of `kvasir-no-fast-path` every delta goes through the request machine.
Peers run in front of workers that give the same answers at the same rate over the peers' protocol. Rows of
`observability` compare routers with all of it on and with all of it off: costs, traces, exemplars, records of
decisions, the console and Prometheus. Client, systems and workers share the machine; the CPU of the process
under test is compared. Rows of `console` are the CPU of its pages for many workers and streams, and the time
until a browser (Debian's package `chromium`) shows its first view. Rows of `fleet` are the CPU of a router
whose workers have no requests, and for how long streams wait while the metrics of many workers are rendered.
Rows of `https` are chunks to clients over TLS.

    make bench-gateway
    make bench-gateway ARGS="--quick"                 a look; writes no report
    make bench-gateway ARGS="--peers haproxy,dynamo"  or none
    make bench-gateway ARGS="--only observability"    these rows; the others stay as the report has them
    make bench-gateway ARGS="--only path"             likewise, those of requests, chunks, TTFT and memory
    make bench-gateway ARGS="--only console"          likewise
    make bench-gateway ARGS="--only fleet"            likewise
    make bench-gateway ARGS="--only https"            likewise
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from kvasir import native
from kvasir.compiled import is_compiled
from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.gateway import bodies, console, measure, pacing
from load_tests.scenarios.gateway.fleet import idle, scrape
from load_tests.scenarios.gateway.in_turn import https, observability
from load_tests.scenarios.gateway.measure import Samples, fill, one_round, say, warm_up, whole_requests
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import Child, ProcessError
from load_tests.scenarios.gateway.rows import (
    AIMED,
    chunk_rows,
    request_rows,
    rss_rows,
    ttft_rows,
    whole_rows,
    without,
)
from load_tests.scenarios.gateway.systems import WORKERS, Stand, System, await_serving, spec
from load_tests.scenarios.gateway.usage import proportional_bytes, resident_bytes
from load_tests.scenarios.tokenizing import Texts
from load_tests.vocabulary import MERGED, large_model, vocabulary_hash

ROUNDS, BLOCKS = 3, 1_000_000
QUICK_SCALE, QUICK_BLOCKS = 0.15, 100_000
_SAMPLES, _SAMPLE_CHARS = 256, 4096
_PATH = "path"
_BEGINNINGS: dict[str, str | tuple[str, ...]] = {
    _PATH: ("request, ", "chunk, ", "whole request, ", "ttft, ", "rss, ", "configuration", "not measured: "),
    "observability": observability.BEGINNING,
    "console": console.BEGINNING,
    "fleet": idle.BEGINNING,
    "https": https.BEGINNING,
}
"""Of the names of the rows that can be measured alone."""
PEERS = ("haproxy", "nginx", "sglang-router", "vllm-router", "dynamo")


def configuration(vocabulary: Path, versions: dict[str, str], scale: float, blocks: int) -> tuple[str, str]:
    """The measured configuration, as one line of JSON, and the first 12 hexadecimal digits of its SHA-256."""
    said = {
        "spec": spec(Path("model"), Path("run"), apart=False),
        "vocabulary": vocabulary_hash(vocabulary),
        "sizes": [[size.name, size.chars, size.count, size.connections] for size in bodies.SIZES],
        "output_tokens": bodies.OUTPUT_TOKENS,
        "mean_request": [bodies.MEAN_PROMPT, bodies.MEAN_OUTPUT],
        "whole_steps": measure.WHOLE_STEPS,
        "whole_s": measure.WHOLE_S,
        "short_step_s": pacing.SHORT_STEP_S,
        "tokens_per_s": pacing.TOKENS_PER_S,
        "streams": measure.STREAMS,
        "workers": WORKERS,
        "deltas_a_message": measure.DELTAS_A_MESSAGE,
        "window_s": measure.WINDOW_S,
        "scale": scale,
        "blocks": blocks,
        "versions": versions,
    }
    text = json.dumps(said, sort_keys=True)
    return text, hashlib.sha256(text.encode()).hexdigest()[:12]


def start(stand: Stand, client: Child, names: list[str], samples: Samples) -> list[System]:
    """All systems that start; the reason why another does not is kept in the samples. Raise ProcessError for
    ours."""
    begin: dict[str, Callable[[], System]] = {
        "haproxy": stand.haproxy,
        "nginx": stand.nginx,
        "sglang-router": stand.sglang_router,
        "vllm-router": stand.vllm_router,
        "dynamo": stand.dynamo,
    }
    systems = [stand.direct(), stand.kvasir(), stand.kvasir(apart=True), stand.kvasir(fast_path=False)]
    systems.append(stand.as_up())
    for system in systems:
        await_serving(client, system)
    for name in names:
        say(f"starting {name}")
        try:
            system = begin[name]()
            await_serving(client, system)
        except ProcessError as error:
            samples.wrong[name] = str(error)
            say(f"  {error}")
        else:
            systems.append(system)
    return systems


def chars_of(vocabulary: Path, tokens: int) -> int:
    """The characters of the bench's texts that have that many tokens, on average."""
    tokenizer, texts = Tokenizer.from_file(str(vocabulary / "tokenizer.json")), Texts()
    encoded = tokenizer.encode_batch([texts.take(_SAMPLE_CHARS) for _ in range(_SAMPLES)])
    return round(tokens * _SAMPLE_CHARS * _SAMPLES / sum(len(each.ids) for each in encoded))


def run(folder: Path, peers: list[str], *, quick: bool) -> tuple[list[Row], str]:
    """All rows, and the configuration's hash. Raise ProcessError."""
    vocabulary = large_model()
    samples = Samples()
    scale, blocks = (QUICK_SCALE, QUICK_BLOCKS) if quick else (1.0, BLOCKS)
    with Stand(folder, vocabulary, Packages()) as stand:
        client = stand.client()
        systems = start(stand, client, peers, samples)
        ours = [system for system in systems if system.name in AIMED]
        say(f"indexing {blocks:,} blocks")
        filled = [fill(system, blocks) for system in ours]
        chars = chars_of(vocabulary, bodies.MEAN_PROMPT)
        say("warming up")
        warm_up(client, systems, samples, min(0.3, scale))
        for number in range(1 if quick else ROUNDS):
            say(f"round {number + 1}")
            one_round(client, systems, samples, scale)
            whole_requests(client, systems, samples, chars, scale)
        rss: list[Row] = []
        for system, (held, before, after) in zip(ours, filled, strict=True):
            pid = system.process.pid
            resident = before, after, resident_bytes(pid)
            about = f"{system.decoding} workers; {MERGED:,} merged ids and 256 special tokens"
            rss += rss_rows(system.name, held, resident, proportional_bytes(pid) / 1e6, about)
            if not system.process.alive:
                raise ProcessError(f"{system.name} ended; {system.process.words()}")
        versions = {system.name: system.version for system in systems if system.version}
    names = [system.name for system in systems[1:]]
    text, digest = configuration(vocabulary, versions, scale, blocks)
    rows = [*request_rows(samples, names), *chunk_rows(samples, names), *whole_rows(samples, names)]
    rows += [*ttft_rows(samples, names), *rss]
    cores = len(os.sched_getaffinity(0))
    rows.append(
        Row(
            "configuration",
            float(cores),
            "cores",
            "higher",
            note=f"{digest}: {text}; client, systems and workers share these cores",
        )
    )
    for what, why in samples.wrong.items():
        rows.append(Row(f"not measured: {what}", 0.0, "figures", "higher", note=why.replace("\n", " ")))
    return rows, digest


def all_rows(folder: Path, peers: list[str], *, quick: bool, only: str | None) -> list[Row]:
    """The rows of the report: of what was measured, and those that it has if `only` some were. Raise
    ProcessError."""
    rows: list[Row] = []
    if only in {None, _PATH}:
        rows, digest = run(folder, peers, quick=quick)
        say(f"configuration {digest}")
    if only is not None and not quick:
        rows += without(read(REPORTS / "gateway.json"), _BEGINNINGS[only])
    if only is None and quick:
        return rows
    starts, scale = (1, QUICK_SCALE) if quick else (observability.STARTS, 1.0)
    if only in {None, "observability"}:
        rows += observability.observability_rows(folder, starts=starts, scale=scale)
    if only in {None, "https"}:
        rows += https.https_rows(folder, rounds=1 if quick else ROUNDS, scale=scale)
    if only in {None, "console"}:
        rows += console.console_rows()
    if only in {None, "fleet"}:
        rows += [*idle.idle_rows(folder, scale=scale), scrape.scrape_row()]
    return rows


def main() -> None:
    """Measure, write the report and print its table."""
    parser = argparse.ArgumentParser(
        prog="load_tests.scenarios.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one short round; writes no report")
    parser.add_argument("--peers", default=",".join(PEERS), help="none, or names of: " + ", ".join(PEERS))
    parser.add_argument("--only", choices=tuple(_BEGINNINGS), help="measure these rows, and keep the others")
    args = parser.parse_args()
    peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := [name for name in peers if name not in PEERS]:
        sys.exit(f"no peer is called {', '.join(unknown)}; there are: {', '.join(PEERS)}")
    if not (native.IS_NATIVE and is_compiled()):
        sys.exit("the native code is not built; figures of Python in its place do not count: make install")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder:
        try:
            rows = all_rows(Path(folder), peers, quick=args.quick, only=args.only)
        except ProcessError as error:
            sys.exit(str(error))
    say(f"{time.monotonic() - began:.0f} s")
    if args.quick:
        for row in rows:
            aims = f"(target {row.target}, peer {row.peer}, ratio {row.ratio})"
            print(f"{row.name}: {row.value:.4g} {row.unit} {aims} {row.note[:300]}")
        return
    asked = "" if args.peers == ",".join(PEERS) else f' ARGS="--peers {args.peers}"'
    print(write("gateway", f"make bench-gateway{asked}", rows).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
