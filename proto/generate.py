"""Generates the wire code from proto/ and third_party/: `python proto/generate.py [OUT]`.

The path of each .proto equals its Python path, so that generated imports need no rewriting. OUT is the
source root to write under, by default `platform`; the freshness test names another.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("kvasir/wire/v1")
THIRD_PARTY = ROOT.parent / "third_party"
EXT_PROC = Path("kvasir/wire/ext_proc")


def sources() -> list[Path]:
    """Every .proto file of the contract, relative to proto/."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*.proto"))


def generate(out: Path) -> None:
    """Write the messages and their types below `out`. Raises RuntimeError when protoc refuses the
    contract; its own message is on stderr.

    Stubs are not generated: both ends hand bytes to gRPC, so that a malformed message is an error of the
    session (see kvasir.wire.codec) and not one inside gRPC.
    """
    _compile(ROOT, sources(), out, PACKAGE)
    vendored = sorted(path.relative_to(THIRD_PARTY) for path in (THIRD_PARTY / EXT_PROC).glob("*.proto"))
    _compile(THIRD_PARTY, vendored, out, EXT_PROC)


def _compile(root: Path, files: list[Path], out: Path, package: Path) -> None:
    (out / package).mkdir(parents=True, exist_ok=True)
    command = [
        "protoc",
        f"--proto_path={root}",
        f"--proto_path={resources.files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        *map(str, files),
    ]
    if protoc.main(command) != 0:
        raise RuntimeError("protoc refused the contract")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "platform")
