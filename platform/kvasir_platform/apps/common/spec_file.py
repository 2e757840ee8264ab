"""The deployment spec in a file that changes under a running process: a mounted ConfigMap."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir_platform.apps.common.peer_tls import with_tls_dir

log = logging.getLogger(__name__)


class SpecFile:
    """Reads the file at once. Raises ConfigError if it is not a spec."""

    def __init__(self, path: Path, tls_dir: Path | None) -> None:
        self._path = path
        self._tls_dir = tls_dir
        self._digest = self._read_digest()
        self.deployment: Deployment = self._load()

    def changed(self) -> Deployment | None:
        """Return the spec if it differs from the last call, else None. An invalid spec is logged once and
        ignored, and so is one of another name, which would be another deployment."""
        digest = self._read_digest()
        if digest is None or digest == self._digest:
            return None
        self._digest = digest
        try:
            found = self._load()
        except ConfigError as error:
            log.error("%s has changed and is ignored: %s", self._path, error.message)
            return None
        if found.name != self.deployment.name:
            log.error(
                "%s changes the deployment's name and is ignored: a running deployment keeps its name",
                self._path,
            )
            return None
        if found == self.deployment:
            return None
        self.deployment = found
        return found

    def _load(self) -> Deployment:
        return with_tls_dir(load(self._path), self._tls_dir)

    def _read_digest(self) -> bytes | None:
        """Return the content; None if it cannot be read: a mount is being replaced."""
        try:
            return hashlib.sha256(self._path.read_bytes()).digest()
        except OSError:
            return None
