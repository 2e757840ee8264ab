"""The previous version of Kvasir, from the history of the repository, for tests in which processes of two
versions run together."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto

ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("platform", "router", "workers")
_GENERATED = "platform/kvasir/wire/v1"
_MOST_COMMITS = 20


class NoPreviousVersion(Exception):
    """The checkout has no version with other messages; the message says why."""


@dataclass(frozen=True, slots=True)
class Version:
    """The sources of a version, from which processes run, without compiled modules unless they are there."""

    root: Path

    @property
    def prefix(self) -> list[str]:
        """What begins the command of a process of this version."""
        return ["env", f"PYTHONPATH={self.path}"]

    @property
    def path(self) -> str:
        """PYTHONPATH of its processes."""
        return os.pathsep.join(str(self.root / package) for package in _PACKAGES)

    def wire(self) -> dict[str, FileDescriptorProto]:
        """The wire's messages, by file."""
        return _wire({each.name: each.read_text() for each in (self.root / _GENERATED).glob("*_pb2.py")})

    def fields(self, message: str) -> set[str]:
        """The names of a message's fields."""
        every = (each for file in self.wire().values() for each in file.message_type)
        return {field.name for each in every if each.name == message for field in each.field}

    def check(self) -> None:
        """Raise AssertionError unless its processes import its own sources."""
        asked = [*self.prefix, sys.executable, "-c", "import kvasir.wire as found; print(found.__file__)"]
        found = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout
        assert found.startswith(str(self.root)), f"processes of {self.root} would run {found}"


THIS = Version(ROOT)


def previous_version(folder: Path) -> Version:
    """The newest version whose messages differ from those of this one by more than comments, written to
    `folder`. Raise NoPreviousVersion."""
    if not (ROOT / ".git").exists():
        raise NoPreviousVersion("the previous version is exported from git, and this is no checkout")
    commit = next(_with_other_messages(), None)
    if commit is None:
        raise NoPreviousVersion("this checkout has no version with other messages: git fetch --unshallow")
    _export(commit, *_PACKAGES, "models").extractall(folder, filter="data")
    return Version(folder)


def _with_other_messages() -> Iterator[str]:
    """The commits before changes of the wire whose messages differ from those of the working tree."""
    ours = THIS.wire()
    changes = _git("log", f"-{_MOST_COMMITS}", "--format=%H", "--", "proto").decode().split()
    for change in changes:
        before = _git("rev-parse", "--verify", "--quiet", f"{change}^", check=False).decode().strip()
        if not before:
            return
        with _export(before, _GENERATED) as export:
            texts = {
                Path(each.name).name: file.read().decode()
                for each in export.getmembers()
                if each.name.endswith("_pb2.py") and (file := export.extractfile(each)) is not None
            }
        if _wire(texts) != ours:
            yield before


def _wire(texts: dict[str, str]) -> dict[str, FileDescriptorProto]:
    """The descriptors in generated code, which have no comments."""
    found = {}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="AddSerializedFile"), args=[ast.Constant(value=bytes(serialized))]
                ):
                    found[name] = FileDescriptorProto.FromString(serialized)
    assert found, "no generated code has descriptors"
    return found


def _export(commit: str, *paths: str) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit, *paths)))


def _git(*arguments: str, check: bool = True) -> bytes:
    """Raise NoPreviousVersion without git, and for what it refuses."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=check, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NoPreviousVersion(f"the previous version is exported from git: {error}") from error
    return done.stdout
