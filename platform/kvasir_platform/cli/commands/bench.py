"""`kvasir bench`: loads an OpenAI-compatible endpoint and measures it, or compares two runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvasir.clock import MonotonicClock
from kvasir.core.errors import ConfigError
from kvasir_platform.bench.client.http_endpoint import HttpConnections, HttpTarget
from kvasir_platform.bench.load import LoadLimits
from kvasir_platform.bench.ramp import RampPlan
from kvasir_platform.bench.report.compare import differences, unlike
from kvasir_platform.bench.report.page import as_page
from kvasir_platform.bench.report.result import BenchResult, as_json, read_result
from kvasir_platform.bench.report.tables import (
    DIFFERENCE_HEAD,
    FIGURES_HEAD,
    RAMP_HEAD,
    difference_rows,
    error_rows,
    figure_rows,
    knee_line,
    ramp_rows,
    rate_lines,
)
from kvasir_platform.bench.run import BenchOptions, BenchRun, prepared
from kvasir_platform.bench.slo import BenchSlo, parse_slo
from kvasir_platform.cli.common.gateway_client import key_headers
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.load_bar import LoadBar
from kvasir_platform.cli.common.output import CommandOutput, table
from kvasir_platform.cli.common.running import GatewayAddress, gateway_site
from kvasir_platform.reports.files import check_folder, write_file
from kvasir_platform.workload.files import load_workload
from kvasir_platform.workload.requests import Workload
from kvasir_platform.workload.shapes import reshaped
from kvasir_platform.workload.text import FileSource, GeneratedSource, parse_workload

_TICK_S = 0.25
_LEAST_REQUESTS = 5


def bench(args: argparse.Namespace, output: CommandOutput, now: datetime) -> int:
    """Measure what `args` name, print the result, and write the files. Returns 1 if no request succeeded, and
    130 if the load was interrupted. Raises ConfigError, and UpstreamError from the server."""
    if args.files:
        raise ConfigError(f"{args.files[0]}: one URL is enough; two files follow the word compare")
    if args.ramp and (args.concurrency or args.rate):
        raise ConfigError("--ramp sets the rate of an open loop; leave --concurrency and --rate out")
    check_folder(args.json, "--json")
    check_folder(args.html, "--html")
    source = _source(args)
    workload = None if args.ramp else _workload(source, args, args.rate)
    options = BenchOptions(
        limits=_limits(args),
        slo=BenchSlo() if args.slo is None else parse_slo(args.slo),
        api=args.api or _api(source, workload),
        model=args.model,
        warmup=args.warmup,
        more=_body(args.body),
        began=now.isoformat(timespec="seconds"),
    )
    result = asyncio.run(_measured(args, options, source, workload, output))
    output.data(as_json(result))
    _print(result, output)
    if args.json is not None:
        write_file(args.json, json.dumps(as_json(result), indent=1) + "\n", "--json")
    if args.html is not None:
        write_file(args.html, as_page(result), "--html")
    if result.interrupted:
        return 130
    return 0 if result.figures.succeeded else 1


def compare(files: Sequence[str], fail_above: float | None, output: CommandOutput) -> int:
    """Compare two results. Returns 1 if a figure is worse by more than `fail_above` percent. Raises
    ConfigError."""
    if len(files) != 2:
        raise ConfigError("compare two files: kvasir bench compare before.json after.json")
    before, after = (read_result(Path(each)) for each in files)
    try:
        found = differences(before, after)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{files[0]} and {files[1]} cannot be compared: {error}") from error
    worse = [] if fail_above is None else [each.name for each in found if each.worse_than(fail_above / 100)]
    output.data(
        {
            "differences": [
                {
                    "name": each.name,
                    "before": each.before,
                    "after": each.after,
                    "change": each.change,
                    "low": each.low,
                    "high": each.high,
                    "verdict": each.verdict,
                }
                for each in found
            ],
            "worse": worse,
        }
    )
    for each in unlike(before, after):
        output.text(f"not alike: {each}")
    output.text(table(DIFFERENCE_HEAD, difference_rows(found), range(1, 5)))
    if worse:
        output.text(f"\nworse by more than {fail_above:g} %: {', '.join(worse)}")
    return 1 if worse else 0


async def _measured(
    args: argparse.Namespace,
    options: BenchOptions,
    source: GeneratedSource | FileSource,
    workload: Workload | None,
    output: CommandOutput,
) -> BenchResult:
    clock = MonotonicClock()
    bar = LoadBar(output)
    most = max(args.max_running, args.concurrency or 0)
    async with HttpConnections(_target(args), most, args.timeout, clock.now) as connections:
        rng = random.SystemRandom()
        server = await prepared(connections, options, bar.say, rng)
        run = BenchRun(connections, server, options, clock=clock, say=bar.say, rng=rng)
        if workload is not None:
            measuring = asyncio.ensure_future(run.measure(workload))
        else:
            plan = _plan(args)
            measuring = asyncio.ensure_future(run.ramp(lambda rate: _step(source, args, rate), plan))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, _interrupt, measuring)
        while not measuring.done():
            await asyncio.wait([measuring], timeout=_TICK_S)
            bar.tick(run.progress, clock.now())
        bar.clear()
        try:
            return await measuring
        except asyncio.CancelledError:
            # Interrupted before there was anything to report.
            raise KeyboardInterrupt from None


def _plan(args: argparse.Namespace) -> RampPlan:
    # A rate of fewer requests in its time says little.
    least = min(args.ramp_from, _LEAST_REQUESTS / args.ramp_step)
    try:
        return RampPlan(start=args.ramp_from, least=least, met=args.ramp_met / 100)
    except ValueError as error:
        raise ConfigError(f"--ramp: {error}") from error


def _interrupt(measuring: asyncio.Future[BenchResult]) -> None:
    """End the load; the next interrupt ends the command."""
    measuring.cancel()
    with contextlib.suppress(ValueError):
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def _source(args: argparse.Namespace) -> GeneratedSource | FileSource:
    source = parse_workload(args.workload)
    if isinstance(source, GeneratedSource):
        return _changed(source, args, duration=args.duration, requests=args.requests, rate=args.rate)
    values = {"duration_s": args.duration, "requests": args.requests}
    return replace(source, **{name: value for name, value in values.items() if value is not None})


def _changed(source: GeneratedSource, args: argparse.Namespace, **values: float | None) -> GeneratedSource:
    """The source with what is given in place of its own."""
    try:
        shape = reshaped(source.shape, **{key: value for key, value in values.items() if value is not None})
    except ValueError as error:
        raise ConfigError(f"workload {args.workload}: {error}") from error
    return replace(source, shape=shape)


def _workload(source: GeneratedSource | FileSource, args: argparse.Namespace, rate: float | None) -> Workload:
    loaded = load_workload(source, random.Random(args.seed), args.workload)  # noqa: S311 - no secrets
    if isinstance(source, FileSource) and rate is not None and loaded.duration_s > 0.0:
        return loaded.sped_up(rate * loaded.duration_s / len(loaded.requests))
    return loaded


def _step(source: GeneratedSource | FileSource, args: argparse.Namespace, rate: float) -> Workload:
    """The workload of one rate of a ramp."""
    if isinstance(source, GeneratedSource):
        return _workload(_changed(source, args, rate=rate, duration=args.ramp_step), args, None)
    loaded = _workload(source, args, rate)
    return loaded.first(sum(each.arrival_s < args.ramp_step for each in loaded.requests) or 1)


def _api(source: GeneratedSource | FileSource, workload: Workload | None) -> Any:
    if workload is not None:
        embeds = all(each.embeds for each in workload.requests)
    else:
        embeds = isinstance(source, GeneratedSource) and source.shape.embeds
    return "embeddings" if embeds else "chat"


def _limits(args: argparse.Namespace) -> LoadLimits:
    closed = args.concurrency is not None
    return LoadLimits(
        concurrency=args.concurrency,
        duration_s=args.duration if closed and args.duration is not None else float("inf"),
        at_a_time=args.max_running,
    )


def _body(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body {text}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f'--body {text}: name an object, as in {{"temperature": 0}}')
    return value


def _target(args: argparse.Namespace) -> HttpTarget:
    headers = _headers(args)
    if args.target is None:
        site = gateway_site(GatewayAddress(None, None, None, None, None))
        if site.scheme == "https":
            raise ConfigError(f"the deployment here serves HTTPS; name {site.url}, and --cacert FILE")
        return HttpTarget(site.url, headers)
    url = args.target if "://" in args.target else f"http://{args.target}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{args.target}: name http://HOST:PORT or https://HOST:PORT")
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if parts.scheme == "http":
        return HttpTarget(base, headers)
    site = Site(parts.netloc, "https", None, args.cacert, args.cert, args.key)
    return HttpTarget(base, headers, site.tls_context())


def _headers(args: argparse.Namespace) -> dict[str, str]:
    if args.api_key_env is not None:
        if not (key := os.environ.get(args.api_key_env)):
            raise ConfigError(f"--api-key-env {args.api_key_env}: the environment has no such variable")
        return {"Authorization": f"Bearer {key}"}
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {args.api_key_file}: {error}") from error
        return {"Authorization": f"Bearer {key}"}
    return key_headers()


def _print(result: BenchResult, output: CommandOutput) -> None:
    output.text(f"\n{result.model} at {result.url}: {result.workload}, {result.api}, {result.mode}")
    if result.interrupted:
        output.text("interrupted: these are the figures until then")
    if result.ramp is not None:
        output.text(f"\n{table(RAMP_HEAD, ramp_rows(result.ramp), range(8))}")
        output.text(f"\n{knee_line(result.ramp)} ({result.slo})")
        output.text(
            f"\nat {result.ramp.knee:.3g} requests/s:" if result.ramp.knee else "\nat the first rate:"
        )
    output.text(f"\n{table(FIGURES_HEAD, figure_rows(result.figures), range(1, 7))}\n")
    for line in rate_lines(result.figures):
        output.text(line)
    output.text(f"SLO: {result.slo}")
    if errors := error_rows(result.figures):
        output.text(f"\n{table(('ERROR', 'COUNT', 'FIRST MESSAGE'), errors, (1,))}")
    for note in result.notes:
        output.text(f"note: {note}")
