"""Composition root of `kvasir up`: a supervisor with the real clock, janitor, gateway and launcher."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import dump
from kvasir.config.spec.deployment import Deployment, ModelSpec
from kvasir.core.errors import StartError
from kvasir_platform.apps.common.peer_tls import certified
from kvasir_platform.cluster.certificates import self_signed
from kvasir_platform.cluster.local.janitor import Janitor, adopt_orphans, marked_environment
from kvasir_platform.cluster.local.launcher import Launcher, LauncherFactory, LaunchSession
from kvasir_platform.cluster.local.processes import Children
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir
from kvasir_platform.cluster.local.supervisor import (
    Probe,
    StartProgress,
    Supervisor,
    SupervisorLimits,
    with_session_token,
)
from kvasir_platform.gateway.tenants.salts import keep_cache_secret

# Added to the drain: the control process, the router and Ray stop one after the other.
_STOP_MARGIN_S = 40.0
_FETCH_GRACE_S = 5.0
# Longer than a deployment runs: the file is as private as the session token, and each start makes another.
_OPERATOR_S = 10 * 365 * 86_400.0
# Tolerates a clock that is set back by this much.
_BACKDATE_S = 300.0
# One Ctrl-C may arrive twice: from the terminal, and from a `make` or a wrapper that forwards it.
_SAME_SIGNAL_S = 1.0
# Ray puts Unix sockets below the temporary folder, whose paths are limited to 107 bytes.
_TEMP_ROOT_BYTES = 12


def ray_launcher(deployment: Deployment, session: LaunchSession) -> Launcher:
    """Return the launcher of pools on a Ray of their own; imported only when used."""
    from kvasir_platform.cluster.ray.launcher import RayLauncher

    return RayLauncher(deployment, session)


async def serve(
    deployment: Deployment,
    runtime: RuntimeDir,
    *,
    spec: str,
    fetch: Sequence[ModelSpec],
    start_timeout_s: float,
    make_launcher: LauncherFactory,
    probe: Probe,
    report: Callable[[StartProgress], None],
    tick: Callable[[], None],
) -> StartError | signal.Signals | None:
    """Run `deployment` until it fails (returns why) or SIGINT, SIGTERM or SIGHUP stops it: returns the signal
    if it was not ready yet, else None. A second signal skips the orderly stop. `runtime` is locked by the
    caller; `spec` names the source of the deployment; `fetch` are the models to download first; `tick` is
    called a few times a second during the start."""
    adopt_orphans()
    deployment = _with_own_files(deployment, runtime)
    deployment, renewing = certified(deployment, runtime.path / "tls", MonotonicClock())
    deployment = with_operator_certificate(deployment, runtime, time.time())
    limits = SupervisorLimits(start_s=start_timeout_s, stop_s=deployment.worker.drain_s + _STOP_MARGIN_S)
    session = _session(deployment, runtime)
    state = DeploymentState(
        name=deployment.name,
        deployment_id=session.deployment_id,
        pid=os.getpid(),
        phase="starting",
        started_at=time.time(),
        model=", ".join(view.model.name for view in deployment.views()),
        spec=spec,
        logs=str(session.logs),
        temp_dir=str(session.temp_dir),
        stop_s=limits.stop_s,
        certificate=_absolute(deployment.gateway.tls.cert_file),
        operator_certificate=_absolute(deployment.gateway.tls.operator_cert_file),
    )
    launcher = make_launcher(deployment, session)
    supervisor = Supervisor(
        deployment,
        launcher,
        runtime,
        state,
        janitor=Janitor(session.deployment_id, started_at=state.started_at, supervised=True),
        probe=probe,
        clock=MonotonicClock(),
        wall_time=time.time,
        report=report,
        limits=limits,
        fetch=partial(_fetch, fetch, session) if fetch else None,
    )
    stopped_by = _stop_on_signals(supervisor)
    beside = [asyncio.create_task(_tick(tick), name="progress display")]
    if renewing is not None:
        beside.append(asyncio.create_task(renewing(), name="certificates"))
    try:
        failure = await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
    return stopped_by[0] if failure is None and supervisor.state.ready_at is None else failure


def _with_own_files(deployment: Deployment, runtime: RuntimeDir) -> Deployment:
    deployment = with_session_token(deployment, runtime.token_file)
    deployment = with_cache_secret(deployment, runtime.cache_secret_file)
    deployment = with_batch_folder(deployment, runtime.path / "batches")
    return with_cost_file(deployment, runtime.cost_file)


def with_cache_secret(deployment: Deployment, path: Path) -> Deployment:
    """Return the deployment with a secret for cache salts in `path`, created there once, unless it names one
    or does not isolate tenants. Raises ConfigError if it cannot be written."""
    if not deployment.gateway.authenticates or deployment.tenancy.cache_secret_file is not None:
        return deployment
    keep_cache_secret(path)
    tenancy = deployment.tenancy.model_copy(update={"cache_secret_file": str(path)})
    return deployment.model_copy(update={"tenancy": tenancy})


def with_batch_folder(deployment: Deployment, path: Path) -> Deployment:
    """Return the deployment with `path` for files and batches, unless it names a storage."""
    if deployment.gateway.batches.storage is not None:
        return deployment
    batches = deployment.gateway.batches.model_copy(update={"storage": str(path)})
    gateway = deployment.gateway.model_copy(update={"batches": batches})
    return deployment.model_copy(update={"gateway": gateway})


def with_cost_file(deployment: Deployment, path: Path) -> Deployment:
    """Return the deployment with costs kept in `path`, unless it says where they are kept."""
    cost = deployment.cost
    if not cost.enabled or cost.file is not None or cost.redis is not None:
        return deployment
    return deployment.model_copy(update={"cost": cost.model_copy(update={"file": str(path)})})


def with_operator_certificate(deployment: Deployment, runtime: RuntimeDir, now: float) -> Deployment:
    """Return the deployment with a certificate by which `kvasir up` and its user's commands connect, created
    for this run, if its gateway requires client certificates and it names none. `now` is in seconds since the
    epoch."""
    tls = deployment.gateway.tls
    if tls.client_ca_file is None or tls.operator_cert_file is not None:
        return deployment
    made = self_signed(f"kvasir {deployment.name} operator", now - _BACKDATE_S, now + _OPERATOR_S)
    runtime.write_private(runtime.operator_file, made)
    tls = tls.model_copy(update={"operator_cert_file": str(runtime.operator_file)})
    gateway = deployment.gateway.model_copy(update={"tls": tls})
    return deployment.model_copy(update={"gateway": gateway})


def _absolute(file: str | None) -> str:
    """Return an absolute path, for other terminals in any folder; "" for None."""
    return "" if file is None else str(Path(file).absolute())


def _session(deployment: Deployment, runtime: RuntimeDir) -> LaunchSession:
    """Create the files and environment of one run."""
    deployment_id = secrets.token_hex(8)
    root = tempfile.gettempdir()
    short = root if len(root) <= _TEMP_ROOT_BYTES else "/tmp"  # noqa: S108 - mkdtemp makes it private
    temp_dir = Path(tempfile.mkdtemp(prefix="kv-", dir=short))
    runtime.write_private(runtime.spec_file, dump(deployment).encode())
    runtime.write_private(runtime.token_file, secrets.token_hex(32).encode())
    # Files that children leave in the default temporary folder are removed with this one.
    env = marked_environment({**os.environ, "TMPDIR": str(temp_dir)}, deployment_id)
    return LaunchSession(deployment_id, runtime.logs, temp_dir, runtime.spec_file, env)


def _stop_on_signals(supervisor: Supervisor) -> list[signal.Signals]:
    """Return a list that gets the first signal that arrives."""
    loop = asyncio.get_running_loop()
    arrived: list[signal.Signals] = []
    first_s = 0.0

    def stop(number: signal.Signals) -> None:
        nonlocal first_s
        if not arrived:
            first_s = loop.time()
            arrived.append(number)
            supervisor.stop_reason = "Ctrl-C" if number == signal.SIGINT else number.name
            supervisor.stop.set()
        elif loop.time() - first_s > _SAME_SIGNAL_S:
            supervisor.hurry.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    return arrived


async def _tick(tick: Callable[[], None], every_s: float = 0.2) -> None:
    clock = MonotonicClock()
    while True:
        tick()
        await clock.sleep(every_s)


async def _fetch(models: Sequence[ModelSpec], session: LaunchSession) -> None:
    """Download models one after the other. Raises StartError if one is not available."""
    for model in models:
        await _fetch_one(model, session)


async def _fetch_one(model: ModelSpec, session: LaunchSession) -> None:
    """Download a model in a process of its own."""
    children = Children(session.logs, session.env)
    try:
        argv = [sys.executable, "-m", "kvasir_platform.apps.fetch_model", model.source, model.revision]
        child = await children.spawn("fetch", argv)
        if await child.wait() != 0:
            raise StartError(
                f"{model.source} could not be downloaded",
                log=str(child.log),
                remedy="check the network, the name and HF_TOKEN, or name a folder in model.source",
            )
    finally:
        await children.stop(_FETCH_GRACE_S)
