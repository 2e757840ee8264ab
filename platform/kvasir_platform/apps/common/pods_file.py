"""The chart's desired pods of each pool, in a file that changes under a running process, and beside it the
number of the release's revision that desires them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray.pod_templates import PodTemplate, pod_templates

log = logging.getLogger(__name__)

REVISION = "revision"
"""The file beside that of the pods, which a chart of an earlier version does not write."""


class PodsFile:
    """Reads the file at once; without a path, no pods are desired. Raises ConfigError if it is unreadable."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._raw = b"{}"
        if path is not None:
            try:
                self._raw = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"the file of desired pods cannot be read: {error}") from None
        self.pods: Mapping[str, PodTemplate] = pod_templates(self._raw)
        self.revision = self._read_revision()
        self._is_valid = True

    def _read_revision(self) -> int:
        """Return 0 if there is none."""
        try:
            return 0 if self._path is None else int(self._path.with_name(REVISION).read_bytes())
        except (OSError, ValueError):
            return 0

    def changed(self) -> bool:
        """Whether the content differs from the last call. Invalid content is logged once and ignored, and so
        is a missing file: a mount is being replaced."""
        if self._path is None:
            return False
        try:
            raw = self._path.read_bytes()
        except OSError:
            return False
        if raw == self._raw:
            if self._is_valid:
                self.revision = self._read_revision()
            return False
        self._raw, self._is_valid = raw, False
        try:
            found = pod_templates(raw)
        except ConfigError as error:
            log.error("%s has changed and is ignored: %s", self._path, error.message)
            return False
        self._is_valid, self.revision = True, self._read_revision()
        changed, self.pods = found != self.pods, found
        return changed
