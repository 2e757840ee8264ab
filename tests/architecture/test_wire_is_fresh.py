"""The generated wire code is up to date with the protobuf files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = Path("kvasir/wire/v1")
VENDORED = Path("kvasir/wire/ext_proc")


def test_the_generated_wire_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "proto/generate.py"), str(tmp_path)], check=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / GENERATED).iterdir()}
    assert fresh, "nothing was generated"
    committed = {path.name: path.read_text() for path in (ROOT / "platform" / GENERATED).glob("*_pb2*.py*")}
    assert committed == fresh, "run: python proto/generate.py"
    fresh = {path.name: path.read_text() for path in (tmp_path / VENDORED).iterdir()}
    assert fresh
    committed = {path.name: path.read_text() for path in (ROOT / "platform" / VENDORED).glob("*_pb2.py*")}
    assert committed == fresh, "run: python proto/generate.py"
