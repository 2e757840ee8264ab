"""Models in object storage: the files beside the weights are copied to a local folder, once.

Routers and workers need configuration, tokenizer and templates as files. Weights stay where they are: the
engine streams them with the Run:ai Model Streamer, an optional package, which also copies the other files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvasir.checkpoint.json_file import read_json_object
from kvasir.config.spec.models import WeightsSpec
from kvasir.core.errors import ConfigError

STREAMER = "runai-model-streamer"
"""The package, as its distribution is named."""
INSTALL_STREAMER = "pip install 'runai-model-streamer[s3,gcs,azure]>=0.15.7'"

_MODULE = "runai_model_streamer"
_SCHEMES = ("s3://", "gs://", "az://")
_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors"]


def is_object_uri(source: str) -> bool:
    """Whether `source` is in object storage."""
    return source.startswith(_SCHEMES)


def streams_weights(model: WeightsSpec) -> bool:
    """Whether engines read the weights of `model` with the streamer."""
    return is_object_uri(model.source) or model.load.format == "runai_streamer"


def streamer_is_installed() -> bool:
    """Whether the streamer can be imported here. It is not imported: that takes seconds."""
    return importlib.util.find_spec(_MODULE) is not None


def refuse_without_streamer(what: str) -> None:
    """Raise ConfigError, for the part of the spec that `what` describes, unless the streamer is installed."""
    if not streamer_is_installed():
        raise ConfigError(
            f"{what} needs the package {STREAMER}, which is not installed; install it: {INSTALL_STREAMER}",
            code="no_streamer",
        )


def stated_weight_bytes(folder: Path) -> int:
    """Return the size of all weights as the index in `folder` states it, 0 if there is none. Raises
    ConfigError for an index that is not JSON."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return 0
    metadata = read_json_object(index).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if isinstance(size, int) and size > 0 else 0


def object_folder(uri: str, named: str, *, download: bool, cache: Path | None = None) -> Path:
    """Return the local folder in `cache` with all files of `uri` but the weights, copied if it is not there
    and `download` is set. `named` describes it in errors. Raises ConfigError if it is not there, or cannot be
    read; by default, `cache` is in the user's cache."""
    # A local copy needs no package, so that a check can be done where it is missing.
    base = Path.home() / ".cache" / "kvasir" / "object-storage" if cache is None else cache
    folder = base / hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    refuse_without_streamer(named)
    if not download:
        raise ConfigError(f"{named} has not been read from object storage yet", code="model_not_cached")
    from runai_model_streamer import pull_files

    _fill(folder, uri, named, pull_files)
    return folder


def _fill(folder: Path, uri: str, named: str, pull: Callable[..., None]) -> None:
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = tempfile.mkdtemp(prefix="draft-", dir=folder.parent)
        pull(uri.rstrip("/") + "/", draft, None, _WEIGHTS)
        if not os.listdir(draft):
            raise ConfigError(f"{named}: there are no files below it; correct the path")
        os.rename(draft, folder)
    except ConfigError:
        raise
    except Exception as error:  # storage libraries have exceptions of their own
        if not folder.is_dir():  # another process may have been faster
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{named} cannot be read: {type(error).__name__}: {why}; check the path and the credentials "
                "of this process (for S3, the variables AWS_*)"
            ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
