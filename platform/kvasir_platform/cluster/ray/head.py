"""A private Ray head for one deployment on one machine.

Ray's defaults are for shared clusters: a dashboard, a log monitor, an autoscaler, a large object store, a
common temporary folder. Pools need none of these, so the head starts without them, with token authentication
and a folder of its own. It is stopped by pid, because `ray stop` would stop every Ray on the machine.
Its processes are in the session of the process that starts it, and in groups of their own (ADR 54).

The GCS may fail: its state is stored outside the process, so a restarted GCS resumes while replicas serve.
`ray start --block` would stop the node with the GCS, so it is not used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvasir.config.spec.redis import RedisServerSpec
from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes.head_state import delete_head_state

log = logging.getLogger(__name__)

NODE_ADDRESS = "127.0.0.1"
"""With this address, and with no other, Ray's processes listen on the loopback interface alone."""
SHARED_ADDRESS = "127.0.0.2"
"""The address of a head that further nodes join: Ray replaces 127.0.0.1 by the machine's outward one."""
OBJECT_STORE_BYTES = 80 << 20
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 1.0
REDIS_TIMEOUT_S = 2.0
FORGET_S = 5.0
_MARK = "KVASIR_RAY_HEAD"
_GCS = "gcs_server"
_RAYLET = "raylet"


def ray_environment(token: str, *, alone: bool = True) -> dict[str, str]:
    """Return the environment of every process that connects to this Ray; `alone`: no further node joins."""
    # Ray keeps 127.0.0.1 only where it makes no clusters, by default on the systems of the variable's name.
    stay = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if alone else {}
    return {"RAY_AUTH_TOKEN": token, **stay, **ray_settings()}


def ray_settings() -> dict[str, str]:
    """Return the same without the token, which a pod reads from a file."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Otherwise replicas get niceness 15: everything else on the machine would run before engines.
        "RAY_worker_niceness": "0",
    }


def head_environment(temp_dir: Path, redis_url: str | None, redis_ca: str | None = None) -> dict[str, str]:
    """Return the environment of the head's own processes: its marker, and where it stores its state, which is
    Redis under a name unique to this run, or a folder below `temp_dir`. `redis_ca` is a file of authorities
    for `rediss://`."""
    mark = {_MARK: str(temp_dir)}
    if redis_url is not None:
        named = {"RAY_REDIS_ADDRESS": redis_url, "RAY_external_storage_namespace": _namespace(temp_dir)}
        return mark | named | _authorities(redis_ca)
    return mark | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(temp_dir / "gcs")}


@dataclass(slots=True)
class RayHead:
    """A running head. `address` is what drivers and workers connect to."""

    address: str
    temp_dir: Path
    redis_url: str | None = None
    redis_ca: str | None = None
    _gcs: psutil.Process | None = None
    _raylet: psutil.Process | None = None
    _gcs_command: list[str] = field(default_factory=list)
    _gcs_environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        *,
        temp_dir: Path,
        token: str,
        cpus: int,
        gpus: int,
        log: Path,
        redis_url: str | None = None,
        redis_ca: str | None = None,
        alone: bool = True,
    ) -> RayHead:
        """Start the head and wait until it accepts drivers. `alone`: it listens on the loopback interface
        only, and no further node can join.

        `temp_dir` must be short, because Ray puts Unix sockets in it, whose paths are limited to 107 bytes.
        Raises ConfigError if Redis does not answer, and with the end of Ray's log if the head does not start.
        """
        if redis_url is not None and not _answers(redis_url):
            raise ConfigError(
                f"ray.head_redis_url: nothing answers at {redis_url}; start Redis there, or unset the field "
                "to keep the state of Ray's head on this machine"
            )
        address = NODE_ADDRESS if alone else SHARED_ADDRESS
        port = _free_port()
        temp_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
        command += [
            f"--port={port}",
            f"--node-ip-address={address}",
            f"--temp-dir={temp_dir}",
            f"--num-cpus={max(1, cpus)}",
            f"--num-gpus={gpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            # The agent cannot be disabled, and its default port would collide with another deployment's.
            f"--ray-client-server-port={_free_port()}",
            "--include-dashboard=false",
            "--include-log-monitor=false",
            "--no-monitor",
            "--disable-usage-stats",
        ]
        own = head_environment(temp_dir, redis_url, redis_ca)
        env = {**os.environ, **ray_environment(token, alone=alone), **own}
        head = cls(f"{address}:{port}", temp_dir, redis_url, redis_ca)
        try:
            head._launch(command, env, log)
        except BaseException:
            head.stop()
            raise
        return head

    @property
    def alive(self) -> bool:
        """Whether the node that runs the replicas is alive; a failed node is not restarted."""
        return self._raylet is not None and runs(self._raylet)

    @property
    def gcs_alive(self) -> bool:
        """Whether the GCS process runs; see `restart_gcs`."""
        return self._gcs is not None and runs(self._gcs)

    def restart_gcs(self) -> None:
        """Restart the GCS from its stored state; returns at once. It must accept connections again within 60
        s of its failure: Ray's own processes exit then."""
        if isinstance(self._gcs, psutil.Popen):
            self._gcs.poll()  # An earlier GCS of ours, which no other process reaps.
        self._gcs = psutil.Popen(
            self._gcs_command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(self._gcs_environment),
            process_group=0,
        )

    def _launch(self, command: list[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as sink:
            try:
                code = subprocess.run(  # noqa: S603 - our own interpreter and arguments
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=env,
                    process_group=0,
                    timeout=START_TIMEOUT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        named = {process.name(): process for process in self._processes()}
        self._gcs, self._raylet = named.get(_GCS), named.get(_RAYLET)
        if code != 0 or self._gcs is None or self._raylet is None:
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            when = "in time" if code is None else f"(exit status {code})"
            redis = f"; it keeps its state in {self.redis_url}: does that answer?" if self.redis_url else ""
            raise ConfigError(f"Ray's head did not start {when}{redis}; its log ends:\n{tail}")
        self._gcs_command, self._gcs_environment = self._gcs.cmdline(), self._gcs.environ()

    def _processes(self) -> list[psutil.Process]:
        """Return the head's processes, replicas included, by marker and not by parent."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == str(self.temp_dir):
                    found.append(process)
        return found

    def stop(self) -> None:
        """Stop the head and every process under it, then remove its folder. Idempotent."""
        tree = self._processes()
        for member in tree:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
        for member in alive:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        if self.redis_url is not None:
            forget(self.redis_url, _namespace(self.temp_dir), self.redis_ca)


def runs(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((NODE_ADDRESS, 0))
        return int(probe.getsockname()[1])


def _namespace(temp_dir: Path) -> str:
    return temp_dir.parent.name


def forget(redis_url: str, namespace: str, redis_ca: str | None = None) -> None:
    """Remove a head's state from Redis; best effort."""
    if not _answers(redis_url):
        log.warning("the state of Ray's head stays in %s, which does not answer", redis_url)
        return
    url = redis_url if "://" in redis_url else f"redis://{redis_url}"
    server = RedisServerSpec(url=url, ca_file=redis_ca)
    try:
        asyncio.run(delete_head_state(server, namespace, FORGET_S))
    except ConfigError as error:
        log.warning("the state of Ray's head stays in %s: %s", redis_url, error.message)


def _authorities(redis_ca: str | None) -> dict[str, str]:
    return {} if redis_ca is None else {"RAY_REDIS_CA_CERT": redis_ca}


def _answers(redis_url: str) -> bool:
    """Whether the port accepts connections; Ray's own client would retry for minutes."""
    try:
        with socket.create_connection(_address(redis_url), timeout=REDIS_TIMEOUT_S):
            return True
    except OSError:
        return False


def _address(redis_url: str) -> tuple[str, int]:
    host, _, port = redis_url.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)
