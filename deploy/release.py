"""Builds the images from bases that are pinned by digest.

    python deploy/release.py digests                             # look the bases' digests up, and keep them
    python deploy/release.py build router --tag registry.example/kvasir-router:0.1.0 [--push]
    python deploy/release.py build worker-cpu --tag registry.example/kvasir-worker:0.1.0-cpu [--push]

A tag may be moved by whoever owns it, so an image is built from a digest only. The digests stand in
deploy/digests.json, which this script writes from what the registry says; without one for its base nothing is
built. Beside each image lies its bill of materials, and after a push the digest for the chart's values.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = ROOT / "deploy" / "digests.json"
# The Python of every image: Ray refuses nodes of another minor version, and the lock files have torch's CPU
# build for this one only.
PYTHON = "3.11"
# Which images there are to build upon: the argument of the Containerfiles, and the image that fills it.
BASES = {"PYTHON_IMAGE": f"docker.io/library/python:{PYTHON}-slim-bookworm"}
BUILDERS = ("docker", "podman")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Run = Callable[[Sequence[str]], str]
"""Runs a command in the project's root and returns what it printed; raises ReleaseError where it fails."""


class ReleaseError(Exception):
    """What cannot be done, and what to do about it."""


@dataclass(frozen=True)
class Image:
    """One image: its Containerfile, the lock file that it installs, and its arguments beside the base."""

    containerfile: str
    lock: str
    arguments: tuple[str, ...] = ()


IMAGES = {
    "router": Image("deploy/Containerfile.router", "base"),
    "worker-cpu": Image("deploy/Containerfile.worker", "cpu", ("PLATFORM=cpu",)),
    "worker-gpu": Image("deploy/Containerfile.worker", "gpu", ("PLATFORM=gpu",)),
}


def look_up(image: str, tools: Sequence[str], run: Run) -> str:
    """The digest that a registry gives for an image's tag, for all of its architectures. `tools` are the
    programs that are installed. Raises ReleaseError."""
    if "skopeo" in tools:
        told = run(["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{image}"])
    elif "crane" in tools:
        told = run(["crane", "digest", image])
    elif "docker" in tools:
        told = run(["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image])
    else:
        raise ReleaseError("install skopeo, crane or docker: one of them asks the registry for digests")
    if _DIGEST.fullmatch(told.strip()) is None:
        raise ReleaseError(f"no digest came back for {image}: {told.strip()[:200]!r}")
    return told.strip()


def pinned(digests: Path) -> dict[str, str]:
    """Each base as `image@digest`. Raises ReleaseError for one without a digest."""
    try:
        found = json.loads(digests.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReleaseError(f"{digests} cannot be read: {error}") from error
    bases = {}
    for argument, image in BASES.items():
        digest = found.get(image)
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise ReleaseError(
                f"{digests.name} has no digest of {image}; look it up: python deploy/release.py digests"
            )
        bases[argument] = f"{image.rpartition(':')[0]}@{digest}"
    return bases


def build_command(builder: str, name: str, tag: str, bases: dict[str, str]) -> list[str]:
    """What builds the image of that name."""
    image = IMAGES[name]
    arguments = [*(f"{key}={value}" for key, value in bases.items()), *image.arguments]
    return [
        *(builder, "build", "--pull", "--file", image.containerfile, "--tag", tag),
        *(part for argument in arguments for part in ("--build-arg", argument)),
        ".",
    ]


def build(name: str, tag: str, *, push: bool, tools: Sequence[str], run: Run, digests: Path) -> str | None:
    """Build an image, write its bill of materials, and push it where that is asked for; returns the digest
    that it then has. Raises ReleaseError."""
    if tag.rpartition(":")[2] == "latest" or ":" not in tag.rpartition("/")[2]:
        raise ReleaseError(f"{tag}: name a version; an image that is called latest cannot be rolled back to")
    bases = pinned(digests)
    builder = next((each for each in BUILDERS if each in tools), None)
    if builder is None:
        raise ReleaseError(f"install one of these, which build images: {', '.join(BUILDERS)}")
    run(build_command(builder, name, tag, bases))
    sbom = run([sys.executable, "requirements/sbom.py", IMAGES[name].lock])
    (digests.parent / f"{name}.sbom.cdx.json").write_text(sbom, encoding="utf-8")
    if not push:
        return None
    run([builder, "push", tag])
    return look_up(tag, tools, run)


def _run(command: Sequence[str]) -> str:
    sys.stderr.write(f"+ {' '.join(command)}\n")
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"{command[0]} failed: {error}") from error
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("digests", help="write deploy/digests.json from what the registry says")
    building = commands.add_parser("build", help="build one image")
    building.add_argument("image", choices=sorted(IMAGES))
    building.add_argument("--tag", required=True, help="its name in the registry, with a version")
    building.add_argument("--push", action="store_true", help="push it, and print its name with its digest")
    args = parser.parse_args(argv)
    tools = [tool for tool in ("skopeo", "crane", *BUILDERS) if shutil.which(tool)]
    try:
        if args.command == "digests":
            found = {image: look_up(image, tools, _run) for image in BASES.values()}
            DIGESTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            return 0
        digest = build(args.image, args.tag, push=args.push, tools=tools, run=_run, digests=DIGESTS)
        if digest is not None:
            sys.stdout.write(f"{args.tag.rpartition(':')[0]}@{digest}\n")
    except ReleaseError as error:
        sys.stderr.write(f"release: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
