"""What a request needs of a cell beside its model: a LoRA adapter, or workers that take its media.

Cells report features. An adapter that is listed in the spec goes by a digest of its name and path, one that
was loaded by its key, which has a digest of its files, and a kind of media by a digest of what the model and
the limits of the spec make of a file, because the gateway has already computed the tokens that stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import chain

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.media.served import MediaInputs
from kvasir.core.identity import WorkerIdentity
from kvasir.core.media.prompts import kinds_of
from kvasir.core.requests import Request
from kvasir.ports.router import ServedAdapter
from kvasir_router.regions.reports import MAX_FEATURES, MAX_LABEL, ModelReport

_NOTHING: Mapping[str, str] = {}
_LOADED = "adapter:"


class Features:
    """The features of one cell. `media` has what each model makes of media, where it takes any."""

    def __init__(self, deployment: Deployment, media: Mapping[str, MediaInputs]) -> None:
        self._listed = {
            adapter.name: f"lora:{_digest(adapter.name, adapter.path)}"
            for view in deployment.views()
            for adapter in view.lora
        }
        self._media = {
            model: {kind: f"{kind}:{_digest(inputs.meaning(kind))}" for kind in inputs.kinds}
            for model, inputs in media.items()
        }

    def needs(self, request: Request) -> Mapping[str, str]:
        """Return the features that a request needs, with what they are in words."""
        if request.adapter is None and not request.media:
            return _NOTHING
        found = {}
        if request.adapter is not None:
            found[self._adapter(request.adapter)] = f"adapter {request.adapter}"
        known = self._media.get(request.model, {})
        for kind in kinds_of(request.media):
            # A kind that this cell knows nothing of is served by no cell.
            found[known.get(kind, "")] = kind.plural
        return found

    def of(
        self, model: str, workers: Iterable[WorkerIdentity], loaded: Iterable[ServedAdapter]
    ) -> tuple[str, ...]:
        """Return the features of a model, given the ready workers and the adapters that were loaded."""
        known = self._media.get(model, {})
        found = set[str]()
        for worker in workers:
            found |= {self._adapter(name) for name in worker.adapters}
            found |= {known[kind] for kind in known if kind in worker.media_kinds}
        keys = (self._adapter(each.key) for each in loaded if each.model == model)
        fitting = (name for name in chain(found, keys) if len(name) <= MAX_LABEL)
        return tuple(sorted(fitting, reverse=True))[:MAX_FEATURES]

    def _adapter(self, key: str) -> str:
        return self._listed.get(key) or f"{_LOADED}{key}"


def loaded_adapters(report: ModelReport) -> list[ServedAdapter]:
    """Return the adapters that were loaded for a model in another cell."""
    keys = [name.removeprefix(_LOADED) for name in report.features if name.startswith(_LOADED)]
    return [ServedAdapter(key.rpartition("@")[0], report.model, key) for key in keys if "@" in key]


def _digest(*parts: str) -> str:
    return blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
