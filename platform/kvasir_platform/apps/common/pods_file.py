"""What the chart wishes for the pods of each pool, as a file that is changed under a running process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray.pod_templates import PodTemplate, pod_templates

log = logging.getLogger(__name__)


class PodsFile:
    """Reads it at once; without a path, nothing is wished. Raises ConfigError where it cannot be read."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._raw = b"{}"
        if path is not None:
            try:
                self._raw = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"the wished pods of pools cannot be read: {error}") from None
        self.pods: Mapping[str, PodTemplate] = pod_templates(self._raw)

    def changed(self) -> bool:
        """Whether something else is wished than at the last call. What is not valid is said once and left
        alone, and so is a file that is away: a mount is being replaced."""
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
            log.error("%s has been changed and is not taken over: %s", self._path, error.message)
            return False
        changed, self.pods = found != self.pods, found
        return changed
