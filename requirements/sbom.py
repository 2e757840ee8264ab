"""Which packages a lock file installs, as a CycloneDX 1.6 document: what auditors and scanners ask for.

    python requirements/sbom.py cpu > sbom.cdx.json

Made from the lock file alone: no network, and the same bytes for the same file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?:\s*;\s*(?P<marker>[^\\]+?))?\s*\\?$")
_HASH = re.compile(r"\s+--hash=sha256:([0-9a-f]{64})\s*\\?$")
_VIA = re.compile(r"\s+#(?: via)?\s+(?P<name>[A-Za-z0-9._-]+)$")
_NAMESPACE = uuid.UUID("6f0a4f5e-3c5b-5d0e-9a53-0a7c2f2d6f11")


@dataclass
class Package:
    """One line of a lock file: exact version, hashes of its files, who wants it."""

    name: str
    version: str
    marker: str = ""
    hashes: list[str] = field(default_factory=list)
    wanted_by: list[str] = field(default_factory=list)

    @property
    def purl(self) -> str:
        """Its package URL."""
        return f"pkg:pypi/{self.name.lower().replace('_', '-')}@{self.version.replace('+', '%2B')}"


def packages(text: str) -> list[Package]:
    """The packages of a lock file. Raises ValueError for a line that is neither pin, hash nor comment."""
    found: list[Package] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if pin := _PIN.match(line):
            found.append(Package(pin["name"], pin["version"], (pin["marker"] or "").strip()))
        elif (digest := _HASH.match(line)) and found:
            found[-1].hashes.append(digest[1])
        elif (via := _VIA.match(line)) and found:
            found[-1].wanted_by.append(via["name"])
        elif not line.lstrip().startswith("#"):
            raise ValueError(f"line {number} is neither a pin, nor a hash, nor a comment: {line!r}")
    return found


def sbom(text: str) -> dict[str, Any]:
    """The document for a lock file's text."""
    pinned = packages(text)
    by_name = {package.name.lower(): package for package in pinned}
    needs: dict[str, set[str]] = {package.purl: set() for package in pinned}
    for package in pinned:
        for parent in package.wanted_by:
            if wanting := by_name.get(parent.lower()):
                needs[wanting.purl].add(package.purl)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, text)}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "kvasir", "bom-ref": "kvasir"}},
        "components": [_component(package) for package in pinned],
        "dependencies": [
            {"ref": "kvasir", "dependsOn": sorted(package.purl for package in pinned)},
            *({"ref": ref, "dependsOn": sorted(needs[ref])} for ref in sorted(needs)),
        ],
    }


def _component(package: Package) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in package.hashes],
    }
    if package.marker:
        component["properties"] = [{"name": "kvasir:marker", "value": package.marker}]
    return component


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(__file__).parent
    names = sorted(path.stem for path in folder.glob("*.lock"))
    parser.add_argument("lock", choices=names, help="which lock file")
    text = (folder / f"{parser.parse_args(argv).lock}.lock").read_text(encoding="utf-8")
    json.dump(sbom(text), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
