"""Makes an adapter's source a folder on this machine: a folder as it is, S3 and the Hugging Face hub by
download.

Downloads of a process share one folder, which is locked while the process lives. They are deleted when the
adapter is unloaded; what a killed process left is deleted by the next one.
"""

from __future__ import annotations

import fcntl
import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from kvasir.core.adapters import allows, check_source, source_not_allowed
from kvasir.core.errors import ConfigError, RequestError
from kvasir_workers.adapters.files import CONFIG_FILE, WEIGHTS_FILE, too_large
from kvasir_workers.adapters.hub import download

_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_LOCK = "lock"


class AdapterSources:
    """Sources that the patterns `allow` cover, with downloads of at most `max_bytes` each below
    `cache_folder`. A download from the hub fails after `timeout_s`. Methods block."""

    def __init__(
        self, allow: Sequence[str], *, max_bytes: int, cache_folder: Path, timeout_s: float = 120.0
    ) -> None:
        self._allow = tuple(allow)
        self._max_bytes = max_bytes
        self._cache = cache_folder
        self._timeout_s = timeout_s
        self._own: Path | None = None
        self._lock: IO[bytes] | None = None

    def fetch(self, source: str) -> Path:
        """Return the folder with the files of `source`. Raise RequestError (adapter_source_not_allowed,
        adapter_unreadable, adapter_too_large, adapter_source_unavailable)."""
        kind = check_source(self._allow, source)
        if kind == "folder":
            return self._folder(source)
        folder = Path(tempfile.mkdtemp(dir=self._downloads()))
        try:
            if kind == "s3":
                self._from_s3(source, folder)
            else:
                repository, _, revision = source.partition("@")
                self._from_hub(repository, revision or None, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def discard(self, folder: Path) -> None:
        """Delete a folder that was downloaded; others are kept."""
        if self._own is not None and folder.parent == self._own:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete all downloads. Idempotent."""
        own, self._own = self._own, None
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _folder(self, source: str) -> Path:
        folder = Path(source)
        if not folder.is_dir():
            raise RequestError(
                f"{source} is not a folder on the worker; name one that every worker of the model can read",
                code="adapter_unreadable",
                param="lora_path",
            )
        # A link must not lead out of what is allowed.
        real = folder.resolve()
        roots = [str(Path(entry).resolve()) for entry in self._allow if entry.startswith("/")]
        if not allows(roots, str(real)):
            raise source_not_allowed(source)
        return real

    def _from_hub(self, repository: str, revision: str | None, folder: Path) -> None:
        try:
            download(
                repository,
                revision,
                _FILES,
                folder,
                max_bytes=self._max_bytes,
                timeout_s=self._timeout_s,
            )
        except ConfigError as error:
            codes = {"file_missing": "adapter_unreadable", "too_large": "adapter_too_large"}
            code = codes.get(error.code)
            if code is None:
                raise _unavailable(error.message) from error
            raise RequestError(error.message, code=code, param="lora_path") from error

    def _from_s3(self, source: str, folder: Path) -> None:
        try:
            boto3: Any = importlib.import_module("boto3")
        except ImportError as error:
            raise _unavailable(
                f"{source} cannot be downloaded: install boto3 in the workers' image (pip install boto3), or "
                "mount the bucket and name the folder"
            ) from error
        bucket, _, prefix = source.removeprefix("s3://").partition("/")
        keys = {name: f"{prefix.rstrip('/')}/{name}".lstrip("/") for name in _FILES}
        try:
            client = boto3.client("s3")
            sizes = [client.head_object(Bucket=bucket, Key=key)["ContentLength"] for key in keys.values()]
            if sum(sizes) > self._max_bytes:
                raise too_large(source, sum(sizes), self._max_bytes)
            for name, key in keys.items():
                client.download_file(bucket, key, str(folder / name))
        except RequestError:
            raise
        except Exception as error:  # boto3's errors are classes made at run time
            raise _unavailable(f"{source} cannot be downloaded: {error}") from error

    def _downloads(self) -> Path:
        """Return the folder of this process, made at the first download."""
        if self._own is None:
            self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep()
            own = Path(tempfile.mkdtemp(dir=self._cache))
            # Named only when it is held, since an unlocked one says that its process has ended.
            unnamed = own / f"{_LOCK}.new"
            self._lock = unnamed.open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(own / _LOCK)
            self._own = own
        return self._own

    def _sweep(self) -> None:
        """Delete the folders of processes that have ended."""
        for lock in self._cache.glob(f"*/{_LOCK}"):
            try:
                with lock.open("rb") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            except OSError:
                continue  # its process lives, or another one is deleting it


def _unavailable(message: str) -> RequestError:
    return RequestError(message, status=502, code="adapter_source_unavailable", param="lora_path")
