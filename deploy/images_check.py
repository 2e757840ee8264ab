"""Builds both images from their Containerfiles and streams a completion through them, without a registry.

    python deploy/images_check.py

For a release, by hand: it downloads what the lock files name, and takes a quarter of an hour. The base is
made with debootstrap, and has the Python of the images. Routers and workers run as the chart runs them: as
the image's user, with a read-only root, without capabilities, and with volumes at /tmp and /dev/shm only.
Needs root, and `apt-get install debootstrap buildah podman runc`. Everything it makes is below --folder,
images included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from release import IMAGES, PYTHON, ROOT

TOOLS = ("debootstrap", "buildah", "podman", "runc")
SUITE = "bookworm"
"""The Debian of the base image that release.py names."""
PACKAGES = "ca-certificates,python3,python3-dev,python3-venv,python-is-python3"
BASE = "localhost/kvasir-check/base:1"
USER = "65532"
CHECKED = ("router", "worker-cpu")
STREAM_S = 300
MAX_FILES, MAX_PROCESSES = 16_384, 4096


class CheckError(Exception):
    """What does not hold, or cannot be done."""


@dataclass(frozen=True)
class Settings:
    """`folder` is for all that is made. `mirror` is where debootstrap downloads from, `pip_conf` the
    configuration of pip in builds, `torch_index` where torch's CPU build is found, and `volumes` what builds
    see beside it; empty ones stand for the usual places. `port` is the first of three."""

    folder: Path
    driver: str = "overlay"
    mirror: str = ""
    pip_conf: str = ""
    torch_index: str = ""
    volumes: tuple[str, ...] = ()
    port: int = 18600

    @property
    def pools(self) -> dict[str, int]:
        """The port of each pool's worker."""
        return {"prefill": self.port + 1, "decode": self.port + 2}

    def spec(self) -> str:
        """The deployment spec, as JSON, which is YAML."""
        pools = [{"name": name, "role": name} for name in self.pools]
        endpoints = [f"{name}=127.0.0.1:{port}" for name, port in self.pools.items()]
        return json.dumps(
            {
                "version": "kvasir/v1",
                "name": "images-check",
                "model": {"source": "kvasir-tiny", "max_model_len": 1024},
                "disaggregation": "always",
                "pools": pools,
                "gateway": {"host": "127.0.0.1", "port": self.port},
                "discovery": {"kind": "static", "endpoints": endpoints},
            }
        )


def tag(name: str) -> str:
    """The name of an image here."""
    return f"localhost/kvasir-check/{name}:1"


def build_command(name: str, settings: Settings) -> list[str]:
    """What builds the image of that name upon BASE."""
    image = IMAGES[name]
    arguments = [f"PYTHON_IMAGE={BASE}", *image.arguments]
    if settings.torch_index and name.startswith("worker"):
        arguments.append(f"TORCH_INDEX={settings.torch_index}")
    volumes = [*settings.volumes]
    if settings.pip_conf:
        volumes.append(f"{settings.pip_conf}:/etc/pip.conf:ro")
    return [
        # Isolation by chroot needs neither a runtime nor control groups.
        *("buildah", "build", "--isolation", "chroot", "--pull-never", "--file", image.containerfile),
        *(part for each in volumes for part in ("--volume", each)),
        *(part for each in arguments for part in ("--build-arg", each)),
        *("--tag", tag(name), "."),
    ]


def run_command(name: str, image: str, arguments: Sequence[str], folder: Path) -> list[str]:
    """What starts a container as the chart does. Its limits are below those of this process: higher ones, as
    podman sets by itself, would need a capability."""
    files = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    own = (f"nofile={files}:{files}", f"nproc={MAX_PROCESSES}:{MAX_PROCESSES}")
    return [
        *("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "run", "--detach", "--name", name),
        *("--read-only", "--read-only-tmpfs=false", "--shm-size", "1g"),
        *("--tmpfs", "/tmp:rw,size=2g,mode=1777"),  # noqa: S108 - as the chart mounts it
        *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", "host"),
        *(part for each in own for part in ("--ulimit", each)),
        *("--volume", f"{folder}:/etc/kvasir:ro"),
        *(tag(image), *arguments),
    ]


class Check:
    """One run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = settings.folder
        self._environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(self._folder / "storage.conf")}

    def prepare(self) -> None:
        """Write the configuration of a storage of its own."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "storage.conf").write_text(
            f'[storage]\ndriver = "{self._settings.driver}"\nrunroot = "{self._folder / "run"}"\n'
            f'graphroot = "{self._folder / "graph"}"\n',
            encoding="utf-8",
        )
        spec = self._folder / "spec"
        spec.mkdir(exist_ok=True)
        # The containers' user reads them.
        (spec / "kvasir.yaml").write_text(self._settings.spec(), encoding="utf-8")
        (self._folder / "key").write_text("none", encoding="utf-8")
        for path in (self._folder, spec, spec / "kvasir.yaml"):
            path.chmod(0o755)

    def base(self) -> None:
        """Make the base image, if it has not been made. Raises CheckError if its Python is another one."""
        if self._run(["buildah", "images", "--quiet", BASE], fails=True):
            return
        root = self._folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        mirror = [self._settings.mirror] if self._settings.mirror else []
        self._run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *mirror])
        archive = self._folder / "root.tar"
        self._run(["tar", "--create", "--file", str(archive), "--directory", str(root), "."])
        self._run(["podman", "import", str(archive), BASE])
        archive.unlink()
        version = self._run(["chroot", str(root), "python", "--version"]).strip()
        shutil.rmtree(root)
        if not version.startswith(f"Python {PYTHON}."):
            raise CheckError(f"the base has {version}, and the images are for Python {PYTHON}")

    def build(self) -> None:
        """Build both images, but for those that an earlier run has kept."""
        for name in CHECKED:
            if self._run(["buildah", "images", "--quiet", tag(name)], fails=True):
                _say(f"{name}: built before")
                continue
            began = time.monotonic()
            self._run(build_command(name, self._settings))
            size = self._run(["buildah", "images", "--format", "{{.Size}}", tag(name)]).strip()
            _say(f"{name}: built in {time.monotonic() - began:.0f} s, {size}")

    def stream(self) -> None:
        """Start a router and two workers, and stream a completion through them. Raises CheckError."""
        spec = self._folder / "spec"
        deployment = "--deployment=/etc/kvasir/kvasir.yaml"
        with self._containers() as names:
            for pool, port in self._settings.pools.items():
                program = ["kvasir_platform.apps.worker_node", deployment]
                self._start(names, pool, "worker-cpu", [*program, f"--pool={pool}", f"--port={port}"], spec)
            self._start(names, "router", "router", ["kvasir_platform.apps.router_app", deployment], spec)
            for name in names:
                self._restricted(name)
            url = f"http://127.0.0.1:{self._settings.port}"
            client = [sys.executable, "helm/kvasir/files/stream.py", f"--url={url}", "--model=kvasir-tiny"]
            client += [f"--key-file={self._folder / 'key'}", f"--timeout-s={STREAM_S}"]
            try:
                _say(self._run(client).strip())
            except CheckError as error:
                logs = [self._run(["podman", "logs", "--tail", "40", name], fails=True) for name in names]
                raise CheckError("\n".join([str(error), *logs])) from error

    def remove(self) -> None:
        """Remove all images and the storage."""
        self._run(["podman", "system", "reset", "--force"], fails=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, names: list[str], name: str, image: str, arguments: Sequence[str], folder: Path) -> None:
        full = f"kvasir-check-{name}"
        self._run(["podman", "rm", "--force", "--ignore", full], fails=True)
        self._run(run_command(full, image, arguments, folder))
        names.append(full)

    def _restricted(self, name: str) -> None:
        """Raises CheckError unless the container runs as the image's user, and cannot write to its root."""
        user = self._run(["podman", "--runtime", "runc", "exec", name, "id", "-u"]).strip()
        if user != USER:
            raise CheckError(f"{name} runs as user {user}")
        writes = ["podman", "--runtime", "runc", "exec", "--user", "0", name, "touch", "/opt/kvasir/x"]
        try:
            self._run(writes)
        except CheckError:
            _say(f"{name} runs as user {user}, and its root cannot be written")
        else:
            raise CheckError(f"{name} may write to its root")

    @contextlib.contextmanager
    def _containers(self) -> Iterator[list[str]]:
        names: list[str] = []
        try:
            yield names
        finally:
            for name in names:
                self._run(["podman", "--runtime", "runc", "rm", "--force", "--time", "10", name], fails=True)

    def _run(self, command: Sequence[str], *, fails: bool = False) -> str:
        """Run a command in the project's root, and return its output. Raises CheckError, unless it may
        fail."""
        sys.stderr.write(f"+ {' '.join(command)}\n")
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode and not fails:
            raise CheckError(f"{command[0]} failed ({done.returncode}); its output is above")
        return done.stdout


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "images", help="for all that is made")
    parser.add_argument("--driver", default="overlay", help="storage: overlay, or vfs where that fails")
    parser.add_argument("--mirror", default="", help="Debian's archive for debootstrap")
    parser.add_argument("--pip-conf", default="", help="configuration of pip in builds")
    parser.add_argument("--torch-index", default="", help="where torch's CPU build is found")
    parser.add_argument("--volume", action="append", default=[], help="HOST:DIR[:ro] in builds; repeatable")
    parser.add_argument("--port", type=int, default=18600, help="the first of three free ports")
    parser.add_argument("--keep", action="store_true", help="keep images: the next run only starts them")
    args = parser.parse_args(argv)
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        sys.stderr.write(f"images-check: install {', '.join(missing)}: apt-get install {' '.join(TOOLS)}\n")
        return 2
    if os.geteuid() != 0:
        sys.stderr.write("images-check: debootstrap and builds in a chroot need root\n")
        return 2
    settings = Settings(
        folder=args.folder.absolute(),
        driver=args.driver,
        mirror=args.mirror,
        pip_conf=args.pip_conf,
        torch_index=args.torch_index,
        volumes=tuple(args.volume),
        port=args.port,
    )
    check = Check(settings)
    try:
        check.prepare()
        check.base()
        check.build()
        check.stream()
    except CheckError as error:
        sys.stderr.write(f"images-check: {error}\n")
        return 1
    finally:
        if not args.keep:
            check.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
