"""Generates the wire code from proto/: `python proto/generate.py [OUT]`.

The path of each .proto equals its Python path, so that generated imports need no rewriting. OUT is the
source root to write under, by default `platform`; the freshness test names another.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("kvasir/wire/v1")


def sources() -> list[Path]:
    """Every .proto file of the contract, relative to proto/."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*.proto"))


def generate(out: Path) -> None:
    """Write the messages and their types below `out`. Raises RuntimeError when protoc refuses the
    contract; its own message is on stderr.

    Stubs are not generated: both ends hand bytes to gRPC, so that a malformed message is an error of the
    session (see kvasir.wire.codec) and not one inside gRPC.
    """
    (out / PACKAGE).mkdir(parents=True, exist_ok=True)
    command = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        *map(str, sources()),
    ]
    if protoc.main(command) != 0:
        raise RuntimeError("protoc refused the contract")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "platform")
