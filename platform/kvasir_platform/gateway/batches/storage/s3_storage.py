"""Objects in S3-compatible storage, through obstore: the only module that imports it.

obstore is the Rust crate object_store. It signs, retries within bounds, uploads large objects in parts, and
takes credentials from the environment or from the role of the pod or machine. An upload in parts is visible
once it is completed, and is aborted if its pieces fail, which are the obligations of `put`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from kvasir.config.spec.redis import S3ServerSpec, bucket_of
from kvasir.core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

_PART_BYTES = 8 << 20
_PARTS_AT_A_TIME = 4
_CONNECT_S = 5.0
_RETRIES = 4
_REFUSED = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "AuthorizationHeaderMalformed",
    "InvalidClientTokenId",
)
_NO_CREDENTIALS = ("/latest/api/token", "/latest/meta-data", "CredentialsProvider")


class S3Storage:
    """ObjectStorage in a bucket, and objects that are written on a condition."""

    def __init__(self, store: S3Store, bucket: str) -> None:
        self._store = store
        self._bucket = bucket

    @classmethod
    def at(cls, url: str, spec: S3ServerSpec, *, limit_s: float | None = None) -> Self:
        """Return the storage at `s3://BUCKET/PREFIX`. `limit_s` bounds a call, which is not
        retried then. Raise ConfigError for a `ca_file` that cannot be used."""
        bucket, prefix = bucket_of(url)
        timeout_s = spec.timeout_s if limit_s is None else min(limit_s, spec.timeout_s)
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
        }
        config: S3Config = {}
        if spec.endpoint is not None:
            config["endpoint"] = spec.endpoint
            client["allow_http"] = spec.endpoint.startswith("http://")
        if spec.region is not None:
            config["region"] = spec.region
        try:
            if spec.ca_file is not None:
                client["root_certificate"] = Path(spec.ca_file).read_bytes()
            store = S3Store(
                bucket,
                prefix=prefix or None,
                config=config,
                client_options=client,
                retry_config={
                    "max_retries": _RETRIES if limit_s is None else 0,
                    "retry_timeout": timedelta(seconds=timeout_s),
                },
            )
        except (OSError, BaseError) as error:
            raise ConfigError(
                f"gateway.batches.s3 cannot be used: {_first_line(error)}; correct it, or the variables AWS_*"
            ) from error
        return cls(store, bucket)

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """See ObjectStorage. It takes 32 MiB of memory at most."""
        rest = iter(pieces)
        start = bytearray()
        for piece in rest:
            start += piece
            if len(start) >= _PART_BYTES:
                break
        else:
            with _named_errors(key):
                obstore.put(self._store, key, bytes(start), use_multipart=False)
            return
        whole = itertools.chain((bytes(start),), rest)
        with _named_errors(key):
            obstore.put(self._store, key, whole, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME)

    def get(self, key: str) -> bytes | None:
        """See ObjectStorage."""
        found = self.tagged(key)
        return None if found is None else found[0]

    def remove(self, key: str) -> None:
        """See ObjectStorage."""
        with _named_errors(key), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def names(self, folder: str) -> list[str]:
        """See ObjectStorage."""
        with _named_errors(folder):
            found = obstore.list_with_delimiter(self._store, folder)["objects"]
        return sorted(each["path"].rpartition("/")[2] for each in found)

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        """Return an object with its entity tag, None if there is none. Raise CapacityError."""
        with _named_errors(key):
            try:
                found = obstore.get(self._store, key)
                return bytes(found.bytes()), found.meta["e_tag"] or ""
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def create(self, key: str, content: bytes) -> str | None:
        """Store an object if there is none. Return its entity tag, None if there is one. Raise
        CapacityError."""
        with _named_errors(key):
            try:
                return obstore.put(self._store, key, content, mode="create")["e_tag"]
            except AlreadyExistsError:
                return None

    def replace(self, key: str, content: bytes, tag: str) -> str | None:
        """Store an object in place of the one with this entity tag. Return the new one's, None if it is
        another object by now, or none. Raise CapacityError."""
        with _named_errors(key):
            try:
                return obstore.put(self._store, key, content, mode={"e_tag": tag})["e_tag"]
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                return None

    def check(self) -> None:
        """Read from the bucket, and change nothing. Raise ConfigError if it is missing or the credentials do
        not let us in, CapacityError if the server does not answer."""
        with self._explained("read from"):
            self.names("open")

    def check_writes(self, name: str, *, conditional: bool) -> None:
        """Write, and remove, an object of this name. Raise as `check`, and ConfigError if a `conditional`
        write takes place in spite of its condition."""
        key = f"checks/{name}"
        with self._explained("write to"):
            self.remove(key)
            tag = self.create(key, b"1")
            kept = self.create(key, b"2") is None and self.replace(key, b"3", '"0"') is None
            kept = kept and tag is not None and self.replace(key, b"4", tag) is not None
            self.remove(key)
        if conditional and not kept:
            raise ConfigError(
                f"the server of gateway.batches.storage ignores the conditions of writes (If-Match, "
                f"If-None-Match) to bucket {self._bucket}, by which routers agree who works on a batch; set "
                "gateway.batches.redis"
            )

    @contextlib.contextmanager
    def _explained(self, step: str) -> Iterator[None]:
        """Raise ConfigError for what waiting does not mend."""
        try:
            yield
        except CapacityError as error:
            text = str(error.__cause__)
            what = f"gateway.batches.storage: the credentials do not let us {step} bucket {self._bucket}"
            remedy = "create it, or correct the name, s3.endpoint or s3.region"
            code = next((each for each in _REFUSED if each in text), None)
            if "NoSuchBucket" in text:
                what = f"gateway.batches.storage: there is no bucket {self._bucket}"
                raise ConfigError(f"{what}; {remedy}") from error
            if any(each in text for each in _NO_CREDENTIALS):
                what = "gateway.batches.storage: there are no credentials for S3"
                raise ConfigError(f"{what}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
            if code is not None:
                raise ConfigError(f"{what} ({code}); correct the variables AWS_*") from error
            if "403 Forbidden" in text or "401 Unauthorized" in text:
                raise ConfigError(
                    f"{what} (access is denied); allow s3:ListBucket, GetObject, PutObject, DeleteObject and "
                    "AbortMultipartUpload"
                ) from error
            raise CapacityError(
                f"gateway.batches.storage: {_first_line(error.__cause__)}", code=error.code
            ) from error


@contextlib.contextmanager
def _named_errors(what: str) -> Iterator[None]:
    """Raise CapacityError for errors of the server, and of the way to it."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise CapacityError(
            f"The storage of files and batches fails at {what}: {type(error).__name__}.",
            code="storage_unavailable",
        ) from error


def _first_line(error: BaseException | None) -> str:
    """Return what an error says, without the state of the client that follows."""
    return " ".join(str(error).partition("\n")[0].split())[:300]
