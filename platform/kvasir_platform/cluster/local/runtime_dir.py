"""Files of a running deployment by which another terminal finds, queries and stops it.

One folder per deployment name, private to the user: a lock that the supervisor holds while it lives (the
kernel releases it however the supervisor ends), its state, the spec of the running deployment, and logs. The
lock says whether one runs; the state says where, and what to clean up after a crash.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.local.launcher import ReplicaStatus

Phase = Literal["starting", "ready", "stopping", "stopped", "failed"]

# struct flock of Linux: type, whence, start, length, pid.
_FLOCK = "hhqqi"


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process of the deployment. `created` (seconds since the epoch) distinguishes it from a later process
    with the same id."""

    pid: int
    created: float
    name: str


class ShmRecord(msgspec.Struct, frozen=True):
    """A shared-memory file that a process of the deployment had open; `inode` distinguishes it from a later
    file of the same name."""

    path: str
    inode: int


class DeploymentState(msgspec.Struct, frozen=True):
    """A deployment as its supervisor last recorded it. Times are seconds since the epoch; `stop_s` is the
    longest duration of its stop. `announced`: the supervisor has printed that it is ready. `certificate` is
    the file of the gateway's server certificate, "" for plain HTTP; `operator_certificate` that of the client
    key and certificate, "" if the gateway requires none."""

    name: str
    deployment_id: str
    pid: int
    phase: Phase
    started_at: float
    model: str
    spec: str
    logs: str
    temp_dir: str
    stop_s: float
    address: str = ""
    ready_at: float | None = None
    announced: bool = False
    failure: str = ""
    certificate: str = ""
    operator_certificate: str = ""
    processes: tuple[ProcessRecord, ...] = ()
    shared_memory: tuple[ShmRecord, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()


def ended(state: DeploymentState) -> bool:
    """Whether the supervisor itself recorded that nothing is left."""
    return state.phase in ("stopped", "failed")


def default_base() -> Path:
    """Return `$KVASIR_HOME`, else `~/.kvasir`: the same folder in all terminals of a user."""
    return Path(os.environ.get("KVASIR_HOME") or Path.home() / ".kvasir")


class RuntimeDir:
    """Return the folder of one deployment name under `base`."""

    def __init__(self, base: Path, name: str) -> None:
        self.path = base / name
        self.name = name

    @property
    def logs(self) -> Path:
        """The folder of every process's log."""
        return self.path / "logs"

    @property
    def spec_file(self) -> Path:
        """The running deployment, as JSON."""
        return self.path / "deployment.json"

    @property
    def token_file(self) -> Path:
        """The secret that routers and workers of this run share."""
        return self.path / "session.token"

    @property
    def cache_secret_file(self) -> Path:
        """The secret from which salts of KV caches are derived; kept between runs, as tiers are."""
        return self.path / "cache.secret"

    @property
    def cost_file(self) -> Path:
        """What requests have cost; kept between runs."""
        return self.path / "costs.sqlite"

    @property
    def operator_file(self) -> Path:
        """The key and certificate by which this user's commands connect to the gateway of this run."""
        return self.path / "operator.pem"

    def create(self) -> None:
        """Make the folder and its `logs`, both private. Raises ConfigError if it is a link, or belongs or is
        open to another user."""
        for folder in (self.path.parent, self.path, self.logs):
            try:
                folder.mkdir(mode=0o700, parents=folder == self.path.parent, exist_ok=True)
                status = folder.lstat()
            except OSError as error:
                raise ConfigError(
                    f"{folder} cannot be created: {error.strerror}; name another folder in KVASIR_HOME"
                ) from error
            if folder.is_symlink() or status.st_uid != os.getuid():
                raise ConfigError(f"{folder} is a link or belongs to another user; set KVASIR_HOME")
            if status.st_mode & 0o077:
                folder.chmod(0o700)

    def lock(self) -> Lock | None:
        """Acquire the lock, held until it is closed or this process ends; None if another has it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        return Lock(descriptor)

    def holder(self) -> int | None:
        """Return the pid of the running supervisor, None if none runs. Not for the process that holds the
        lock: closing any descriptor of the file would release it."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        finally:
            os.close(descriptor)
        return None if kind == fcntl.F_UNLCK else pid

    def read(self) -> DeploymentState | None:
        """Return the last written state; None if there is none or it cannot be parsed."""
        try:
            return msgspec.json.decode((self.path / "state.json").read_bytes(), type=DeploymentState)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, state: DeploymentState) -> None:
        """Replace the state atomically."""
        self.write_private(self.path / "state.json", msgspec.json.format(msgspec.json.encode(state)))

    def write_private(self, path: Path, data: bytes) -> None:
        """Write a file that only this user can read, atomically."""
        partial = path.with_name(path.name + ".new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        partial.replace(path)


class Lock:
    """A held lock; closing releases it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def deployments(base: Path) -> list[RuntimeDir]:
    """Return every deployment name that has a folder under `base`, running or not, sorted."""
    if not base.is_dir():
        return []
    return [RuntimeDir(base, entry.name) for entry in sorted(base.iterdir()) if (entry / "lock").exists()]
