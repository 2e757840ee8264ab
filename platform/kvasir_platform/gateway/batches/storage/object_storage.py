"""Objects in S3-compatible storage, through fsspec: the only module that imports it.

fsspec is a library of file systems by URL, each in a package of its own (s3fs for `s3://`). An upload becomes
visible when its file is closed, which is the obligation of `put`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import fsspec

from kvasir.core.errors import CapacityError, ConfigError

INSTALL = "pip install s3fs"


class UrlStorage:
    """ObjectStorage below a URL such as `s3://BUCKET/PREFIX`. Raise ConfigError if its file system is not
    installed."""

    def __init__(self, url: str) -> None:
        try:
            self._files, self._root = fsspec.url_to_fs(url.rstrip("/"), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"gateway.batches.storage {url} needs a file system that is not installed; for s3:// install "
                f"it: {INSTALL}",
            ) from error

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """See ObjectStorage."""
        cut = False

        def sound() -> Iterator[bytes]:
            nonlocal cut
            try:
                yield from pieces
            except Exception:
                cut = True
                raise

        def write() -> None:
            self._files.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
            with self._files.open(self._path(key), "wb") as file:
                for piece in sound():
                    file.write(piece)

        try:
            self._tried(key, write)
        except CapacityError:
            if cut:
                # Closing the file has stored the pieces before the one that failed.
                self.remove(key)
            raise

    def get(self, key: str) -> bytes | None:
        """See ObjectStorage."""

        def read() -> bytes | None:
            try:
                content: bytes = self._files.cat_file(self._path(key))
            except FileNotFoundError:
                return None
            return content

        found: bytes | None = self._tried(key, read)
        return found

    def remove(self, key: str) -> None:
        """See ObjectStorage."""

        def remove() -> None:
            try:
                self._files.rm_file(self._path(key))
            except FileNotFoundError:
                return

        self._tried(key, remove)

    def names(self, folder: str) -> list[str]:
        """See ObjectStorage."""

        def listed() -> list[str]:
            try:
                found = self._files.ls(self._path(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

        names: list[str] = self._tried(folder, listed)
        return names

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _tried(self, what: str, step: Any) -> Any:
        try:
            return step()
        except Exception as error:  # each file system has exceptions of its own
            raise CapacityError(
                f"The storage of files and batches fails at {what}: {type(error).__name__}.",
                code="storage_unavailable",
            ) from error
