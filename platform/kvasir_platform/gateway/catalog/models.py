"""Which models a gateway serves, and what the edge knows of each: its tokenizer, its context, its powers.

A client names a model or one of its adapters, and both are found in one look: every call begins with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvasir.config.load.model_files import Matryoshka
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import RequestError
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities, model_capabilities
from kvasir_platform.gateway.prompt.tokenization import Tokenizer, TokenizerPool


@dataclass(frozen=True, slots=True)
class EdgeModel:
    """One model. `context` is in tokens; `matryoshka` says to how many dimensions its embeddings may be
    cut, None to none."""

    name: str
    context: int
    adapters: tuple[str, ...]
    capabilities: ModelCapabilities
    tokenizers: TokenizerPool
    matryoshka: Matryoshka | None = None

    @classmethod
    def of(
        cls, view: Deployment, tokenizer: Tokenizer | TokenizerPool, matryoshka: Matryoshka | None = None
    ) -> EdgeModel:
        """The model of a single-model deployment. Models with the same tokenizer may share a pool."""
        return cls(
            name=view.model.name,
            context=view.model.max_model_len,
            adapters=tuple(lora.name for lora in view.lora),
            capabilities=model_capabilities(view),
            tokenizers=tokenizer if isinstance(tokenizer, TokenizerPool) else TokenizerPool(tokenizer),
            matryoshka=matryoshka,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, with its chat template."""
        return self.tokenizers.tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """What a client's `model` stands for: a model, and one of its LoRA adapters or none."""

    model: EdgeModel
    adapter: str | None = None


class ModelTable:
    """All models of a gateway; the first one is for the few calls that may leave it out."""

    def __init__(self, models: Iterable[EdgeModel]) -> None:
        self.models = tuple(models)
        self.first = self.models[0]
        self._by_name = {model.name: Served(model) for model in self.models}
        self._by_name |= {name: Served(model, name) for model in self.models for name in model.adapters}

    def find(self, name: str | None) -> Served:
        """What serves `name`, None for the first model. Raises RequestError 404 (`model_not_found`)."""
        found = self._by_name.get(self.first.name if name is None else name)
        if found is None:
            raise no_such_model(name or "")
        return found

    def objects(self, created: int) -> dict[str, dict[str, Any]]:
        """Each model and adapter by its name, as GET /v1/models lists it; `created` is Unix time."""
        return {name: _object(name, served, created) for name, served in self._by_name.items()}

    def close(self) -> None:
        """Let the threads of all tokenizers go. Idempotent."""
        for model in self.models:
            model.tokenizers.close()


def no_such_model(name: str) -> RequestError:
    """What is said of a model that is not served here."""
    return RequestError(
        f"The model {name[:256]!r} does not exist here; GET /v1/models lists what does.",
        status=404,
        code="model_not_found",
        param="model",
    )


def _object(name: str, served: Served, created: int) -> dict[str, Any]:
    model = served.model
    shown: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvasir",
        "max_model_len": model.context,
        "task": "generate" if model.capabilities.generates else "embed",
    }
    return shown if served.adapter is None else {**shown, "root": name, "parent": model.name}
