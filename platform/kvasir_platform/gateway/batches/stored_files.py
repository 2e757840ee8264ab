"""The files of tenants in storage, within their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvasir.config.spec.edge import BatchesSpec
from kvasir.core.errors import RequestError
from kvasir.ports.storage import ObjectStorage
from kvasir_platform.gateway.batches.names import ListQuery, file_id, no_file
from kvasir_platform.gateway.batches.schema import FileList, FileObject

_FILE = msgspec.json.Decoder(FileObject)


class StoredFiles:
    """Files by tenant and id. `wall` is Unix time in seconds. Methods block, and raise RequestError, or
    CapacityError if the storage fails."""

    def __init__(self, storage: ObjectStorage, spec: BatchesSpec, wall: Callable[[], float]) -> None:
        self._storage = storage
        self._spec = spec
        self._wall = wall
        self._known: dict[str, dict[str, FileObject]] = {}
        """By tenant: those that were read once. They never change."""

    def add(self, tenant: str, name: str, filename: str, purpose: str, content: memoryview) -> FileObject:
        """Store an upload. Raise RequestError if it exceeds the tenant's limits."""
        spec, held = self._spec, self._all(tenant)
        used = sum(each.bytes for each in held.values())
        if len(held) >= spec.max_files or used + len(content) > spec.max_bytes:
            raise RequestError(
                f"You have {len(held)} files of {used} bytes, and your limits are {spec.max_files} files and "
                f"{spec.max_bytes} bytes. Delete some.",
                code="file_limit",
                param="file",
            )
        return self.put(tenant, name, filename, purpose, [bytes(content)])

    def put(self, tenant: str, name: str, filename: str, purpose: str, pieces: Iterable[bytes]) -> FileObject:
        """Store a file, in place of one of the same id."""
        size = 0

        def counted() -> Iterable[bytes]:
            nonlocal size
            for piece in pieces:
                size += len(piece)
                yield piece

        self._storage.put(f"{tenant}/contents/{name}", counted())
        now = int(self._wall())
        made = FileObject(
            id=name,
            bytes=size,
            created_at=now,
            expires_at=now + int(self._spec.retention_s),
            filename=filename,
            purpose=purpose,
        )
        self._storage.put(f"{tenant}/files/{name}", [msgspec.json.encode(made)])
        self._known.get(tenant, {}).pop(name, None)
        return made

    def show(self, tenant: str, name: str) -> FileObject:
        """Return a file. Raise RequestError 404."""
        found = self._storage.get(f"{tenant}/files/{file_id(name)}")
        if found is None:
            raise no_file(name)
        return _FILE.decode(found)

    def content(self, tenant: str, name: str) -> bytes:
        """Return the content of a file. Raise RequestError 404."""
        found = self._storage.get(f"{tenant}/contents/{file_id(name)}")
        if found is None:
            raise no_file(name)
        return found

    def remove(self, tenant: str, name: str) -> None:
        """Remove a file."""
        self._storage.remove(f"{tenant}/files/{file_id(name)}")
        self._storage.remove(f"{tenant}/contents/{name}")

    def page(self, tenant: str, query: bytes) -> FileList:
        """Return the files that a query asks for."""
        page = ListQuery(query, file_id, default=10_000, most=10_000, fields=("purpose",))
        held, purpose = self._all(tenant), page.further.get("purpose", "")
        shown, more = page.of(name for name, each in held.items() if purpose in ("", each.purpose))
        first, last = (shown[0], shown[-1]) if shown else (None, None)
        return FileList("list", [held[name] for name in shown], first, last, more)

    def expire(self, tenant: str) -> None:
        """Remove the files that are too old."""
        now = self._wall()
        for name, each in self._all(tenant).items():
            if each.expires_at < now:
                self.remove(tenant, name)

    def _all(self, tenant: str) -> dict[str, FileObject]:
        """Return all files of a tenant by id."""
        known = self._known.get(tenant, {})
        held = {
            name: known.get(name) or self.show(tenant, name)
            for name in self._storage.names(f"{tenant}/files")
        }
        self._known[tenant] = held
        return held
