"""Models on the Hugging Face Hub: their folder in the local cache, and what can be known before a download.

A download takes minutes to hours. Whether the model exists, may be read, is supported and fits needs only
config.json and the headers of the weight files, which are read by range requests.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.checkpoint.model_config import ModelConfig, read_model_config
from kvasir.checkpoint.tensors import TensorHeader
from kvasir.config.load.not_models import other_kind
from kvasir.core.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REQUEST_S = 5.0
HEADERS_S = 20.0
"""Seconds for the headers of all weight files."""
_CONNECTIONS = 16
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
"""What is downloaded. Code is run only with model.trust_remote_code."""
_DENIED = (401, 403)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HubFiles:
    """A model's files on the Hub. `files` are their names, and `tensors` those of its safetensors files:
    empty if not all headers could be read within HEADERS_S. A download of `download_bytes` is missing in the
    local cache, whose folder is `cache` and has `free_bytes` of free space."""

    config: ModelConfig
    files: frozenset[str]
    tensors: tuple[TensorHeader, ...]
    download_bytes: int
    cache: str
    free_bytes: int


class HubUnreachableError(ConfigError):
    """The Hub did not answer, so nothing is known about the model."""


def cached_or_fetched(source: str, revision: str, download: bool, named: str) -> Path:
    """Return the folder of `source` in the local cache, which `download` may fill. Raises ConfigError, with
    code `model_not_cached` if it is only not there yet."""
    try:
        # Imported here: the router serves local folders without huggingface_hub installed.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{named} is no folder, and huggingface_hub is not installed to fetch it; "
            "install huggingface_hub or name a folder"
        ) from error
    try:
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=_FILES, local_files_only=True)
        )
    except LocalEntryNotFoundError as error:
        if not download:
            raise ConfigError(
                f"{named} (revision {revision}) is not in the local Hugging Face cache",
                code="model_not_cached",
            ) from error
    except HFValidationError as error:
        raise ConfigError(f"{named} is neither a folder nor a Hugging Face id") from error
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{named} (revision {revision}) is not in the local Hugging Face cache "
            f"and could not be fetched: {error}"
        ) from error


def hub_files(source: str, revision: str, endpoint: str | None = None) -> HubFiles:
    """Read config.json and the headers of the weight files of `source`, kilobytes to a few megabytes, without
    touching the local cache. `endpoint` is the Hub's address if it is not the default.

    Raises HubUnreachableError if the Hub does not answer, and ConfigError if the model does not exist there,
    may not be read, or cannot be served."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    api = HfApi(endpoint=endpoint)
    with _answers(source, revision), tempfile.TemporaryDirectory(prefix="kvasir-hub-") as folder:
        found = api.model_info(source, revision=revision, timeout=REQUEST_S, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        files = frozenset(sizes)
        if "config.json" not in files:
            nothing = "holds no config.json, so it is no model", "name another one"
            what, remedy = other_kind(files) or nothing
            raise ConfigError(f"{source} (revision {revision}) {what}; {remedy}")
        # Of one commit, also if the branch moves meanwhile. Not into the cache, where a snapshot of one file
        # could be taken for the model.
        commit, local = found.sha or revision, Path(folder, *source.split("/"))
        api.hf_hub_download(source, "config.json", revision=commit, local_dir=local)
        config = read_model_config(local)
        tensors = _tensors(api, source, commit, _shards(files))
    wanted = sum(size for name, size in sizes.items() if any(fnmatch(name, each) for each in _FILES))
    cache = Path(HF_HUB_CACHE)
    missing = max(0, wanted - _downloaded_bytes(cache / f"models--{source.replace('/', '--')}" / "blobs"))
    return HubFiles(config, files, tensors, missing, HF_HUB_CACHE, _free_bytes(cache))


def _downloaded_bytes(blobs: Path) -> int:
    """What an interrupted download has left, which the next one continues."""
    return sum(each.stat().st_size for each in blobs.glob("*") if each.is_file())


def _free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


def _shards(files: frozenset[str]) -> list[str]:
    """The weight files, without copies in another layout beside the sharded or single one."""
    shards = sorted(each for each in files if each.endswith(".safetensors") and "/" not in each)
    # In the order of kvasir.checkpoint.tensors.weight_files, which vLLM follows.
    if consolidated := [each for each in shards if each.startswith("consolidated")]:
        return consolidated
    if _INDEX in files:
        return [each for each in shards if each.startswith("model-")] or shards
    return ["model.safetensors"] if "model.safetensors" in shards else shards


def _tensors(api: HfApi, source: str, commit: str, shards: list[str]) -> tuple[TensorHeader, ...]:
    """Their tensors, or none if a header could not be read."""
    from huggingface_hub.errors import SafetensorsParsingError

    pool = ThreadPoolExecutor(max_workers=_CONNECTIONS)
    try:
        reads = {
            pool.submit(
                api.parse_safetensors_file_metadata, source, shard, revision=commit, timeout=REQUEST_S
            ): shard
            for shard in shards
        }
        return tuple(
            TensorHeader(
                name, each.dtype, tuple(each.shape), each.data_offsets[1] - each.data_offsets[0], reads[read]
            )
            for read in as_completed(reads, timeout=HEADERS_S)
            for name, each in read.result().tensors.items()
        )
    except TimeoutError:
        return ()
    except SafetensorsParsingError as error:
        raise ConfigError(f"{source}: {error}") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _answers(source: str, revision: str) -> Iterator[None]:
    """Turn the Hub's errors into a sentence and what to do."""
    # HTTPError is that of the HTTP client which the installed huggingface_hub uses.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(
            f"{source} is gated; accept its terms on its page and set HF_TOKEN to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        # A path of two parts has the form of an id.
        nor = f", and there is no folder {source}" if Path(source).parent.is_dir() else ""
        raise ConfigError(
            f"the Hub has no model {source}, or it is private{nor}; correct model.source, or set HF_TOKEN to "
            "a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{source} has no revision {revision}; correct model.revision") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in _DENIED:
            raise ConfigError(
                f"the Hub denies {source} to this token (HTTP {error.response.status_code}); set HF_TOKEN to "
                "a valid one that may read it, or unset it and log in with `hf auth login`"
            ) from error
        raise HubUnreachableError(f"the Hub does not answer: {type(error).__name__}: {error}") from error


def download_files(
    repository: str, revision: str | None, names: Sequence[str], folder: Path, *, max_bytes: int
) -> None:
    """Download those files of a Hugging Face repository into `folder`, all of one commit. Raises ConfigError
    if one does not exist or cannot be downloaded, or if they have more than `max_bytes` in total."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{repository} cannot be downloaded: install huggingface_hub on the workers"
        ) from error
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        if missing := [name for name in names if name not in sizes]:
            raise ConfigError(f"{repository} has no {missing[0]}", code="file_missing")
        if (size := sum(sizes[name] for name in names)) > max_bytes:
            raise ConfigError(f"{repository} has {size} bytes, more than {max_bytes}", code="too_large")
        snapshot_download(repository, revision=info.sha, allow_patterns=list(names), local_dir=folder)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{repository} cannot be downloaded: {error}") from error
