"""`kvasir up`: checks, starts and serves a deployment, and removes everything at its end."""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from signal import Signals

from kvasir.core.errors import ConfigError, StartError
from kvasir_platform.apps.up_app import ray_launcher, serve
from kvasir_platform.cli.commands.check import has_errors, print_findings
from kvasir_platform.cli.common.detach import detach, follow
from kvasir_platform.cli.common.gateway_client import missing_to_serve
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.progress import ProgressDisplay, explain
from kvasir_platform.cli.common.refusals import raise_if_refused
from kvasir_platform.cli.common.spec_file import chosen_deployment, chosen_file
from kvasir_platform.cluster.local.cleanup import sweep
from kvasir_platform.cluster.local.launcher import LauncherFactory
from kvasir_platform.cluster.local.runtime_dir import RuntimeDir, default_base
from kvasir_platform.cluster.preflight.checks import examine
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.gpu_memory import with_gpus
from kvasir_platform.cluster.preflight.movement import whole_where_needed
from kvasir_platform.cluster.preflight.probe import probe


def up(args: argparse.Namespace, output: CommandOutput, make_launcher: LauncherFactory | None) -> int:
    """Run a deployment until it is stopped. Return 0 after an orderly stop, 128 and the number of the signal
    that ended its start, and 1 after a failure."""
    began = time.monotonic()
    source = str(chosen_file(args) or "the embedded default")
    deployment = chosen_deployment(args)
    runtime = RuntimeDir(default_base(), deployment.name)
    runtime.create()
    if args.detach:
        log = runtime.logs / "up.log"
        log.unlink(missing_ok=True)
        child = detach(log)
        if child is not None:
            return follow(child, runtime, log, output.raw)
    lock = runtime.lock()
    if lock is None:
        raise _AlreadyRuns(runtime)
    with lock:
        output.text(f"kvasir up: {', '.join(view.model.name for view in deployment.views())}, from {source}")
        earlier = sweep(runtime)
        for thing in earlier.killed + earlier.removed:
            output.text(f"  cleaned up after an earlier run: {thing}")
        machine = probe(deployment)
        deployment, findings = whole_where_needed(deployment, machine)
        deployment, chosen = with_gpus(deployment, machine)
        findings += [*chosen, *examine(deployment, machine)]
        _show(findings, chosen, output)
        if has_errors(findings):
            return 1
        _allow_open_files()
        replicas = {pool.name: pool.replicas for pool in deployment.pools}
        display = ProgressDisplay(deployment, output, runtime.logs, lambda: time.monotonic() - began)
        end = asyncio.run(
            serve(
                deployment,
                runtime,
                spec=source,
                fetch=[view.model for view in deployment.views() if machine.model_of(view).to_download],
                start_timeout_s=args.timeout or deployment.scaling.start_timeout_s,
                make_launcher=make_launcher or ray_launcher,
                probe=lambda _: _missing(runtime, replicas),
                report=display.show,
                tick=display.tick,
            )
        )
    if isinstance(end, Signals):
        return 128 + end
    if end is not None:
        explain(end, output)
    return 0 if end is None else 1


async def _missing(runtime: RuntimeDir, replicas: Mapping[str, int]) -> str | None:
    """Return what keeps the gateway from serving, queried as from another terminal. Raise StartError if that
    cannot change, given the number of `replicas` by pool."""
    state = runtime.read()
    if state is None:
        return "its state file is unreadable"
    site = Site.of_state(state)
    missing = await missing_to_serve(site)
    if missing is not None:
        await raise_if_refused(site, replicas)
    return missing


class _AlreadyRuns(StartError):
    """Return the error for a name that another supervisor holds."""

    code = "already_running"

    def __init__(self, runtime: RuntimeDir) -> None:
        pid, state = runtime.holder(), runtime.read()
        where = f" at {Site.of_state(state).url}" if state is not None and state.address else ""
        super().__init__(
            f"{runtime.name} already runs{where} (pid {pid}). Stop it with `kvasir down {runtime.name}`, "
            "or start another with --set name=another --port 0"
        )


def _show(findings: Sequence[Finding], chosen: Sequence[Finding], output: CommandOutput) -> None:
    """Log warnings, errors and what was chosen where the spec leaves it open."""
    output.data({"event": "checked", "findings": [asdict(finding) for finding in findings]})
    print_findings([each for each in findings if each.level != "ok" or each in chosen], output)
    if has_errors(findings):
        output.text("nothing was started")


def _allow_open_files() -> None:
    """Streams are sockets: raise the soft limit to the hard one, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the limit of open files cannot be raised to {hard}: {error}") from error
