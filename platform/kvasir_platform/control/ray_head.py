"""A private Ray head for one deployment on one machine.

Ray's defaults are made for clusters that people share: a dashboard, a log monitor, an autoscaler, a
large object store, a temp folder that all heads write to. Pools need none of that, so the head is
started bare, with token authentication and a folder of its own, and stopped by pid: `ray stop` would
take every Ray on the machine with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvasir.core.errors import ConfigError

# 127.0.0.1 is silently replaced by the machine's outward address; 127.0.0.2 is kept.
NODE_ADDRESS = "127.0.0.2"
OBJECT_STORE_BYTES = 80 << 20
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 1.0


def ray_environment(token: str) -> dict[str, str]:
    """What every process that talks to this Ray has in its environment."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


@dataclass(slots=True)
class RayHead:
    """A running head. `address` is what drivers and workers connect to."""

    address: str
    temp_dir: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls,
        *,
        temp_dir: Path,
        token: str,
        cpus: float,
        gpus: float,
        log: Path,
    ) -> RayHead:
        """Start the head and wait until it listens.

        `temp_dir` must be short (Ray puts Unix sockets in it, whose paths are limited to 107 bytes).
        Raises ConfigError with the end of its log when it does not come up.
        """
        port = _free_port()
        temp_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [
            f"--port={port}",
            f"--node-ip-address={NODE_ADDRESS}",
            f"--temp-dir={temp_dir}",
            f"--num-cpus={max(1, round(cpus))}",
            f"--num-gpus={round(gpus)}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            # It cannot be switched off, and its default port would collide with another deployment's.
            f"--ray-client-server-port={_free_port()}",
            "--include-dashboard=false",
            "--include-log-monitor=false",
            "--no-monitor",
            "--disable-usage-stats",
        ]
        with log.open("ab") as sink:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ray_environment(token)},
                start_new_session=True,
            )
        head = cls(address=f"{NODE_ADDRESS}:{port}", temp_dir=temp_dir, process=process)
        try:
            head._wait_until_listening(port, log)
        except BaseException:
            head.stop()
            raise
        return head

    def _wait_until_listening(self, port: int, log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex((NODE_ADDRESS, port)) == 0:
                    return
            time.sleep(0.05)
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        raise ConfigError(f"Ray's head did not come up within {START_TIMEOUT_S:.0f} s; its log ends:\n{tail}")

    def stop(self) -> None:
        """End the head and every process under it, then remove its folder. Idempotent."""
        tree: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            tree = [root, *root.children(recursive=True)]
        for member in tree:
            with suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
        for member in alive:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
        if self.process.poll() is None:
            self.process.wait(timeout=STOP_TIMEOUT_S)
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((NODE_ADDRESS, 0))
        return int(probe.getsockname()[1])
