"""The chart's desired pods of each pool, in a file that changes under a running process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray.pod_templates import PodTemplate, pod_templates

log = logging.getLogger(__name__)


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
            return False
        self._raw = raw
        try:
            found = pod_templates(raw)
        except ConfigError as error:
            log.error("%s has changed and is ignored: %s", self._path, error.message)
            return False
        changed, self.pods = found != self.pods, found
        return changed
