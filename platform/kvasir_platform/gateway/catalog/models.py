"""Which models a gateway serves, and what the edge knows of each: its tokenizer, its context, its powers.

A client names a model or one of its adapters, and both are found in one look: every call begins with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    """The models of a gateway. `first` serves the calls that may leave the model out; `names` are those of
    models and adapters."""

    def __init__(self, models: Iterable[EdgeModel]) -> None:
        self.models = tuple(models)
        self.first = self.models[0]
        self._by_name = {model.name: Served(model) for model in self.models}
        self._by_name |= {name: Served(model, name) for model in self.models for name in model.adapters}
        self.names = tuple(self._by_name)

    def find(self, name: str | None) -> Served:
        """What serves `name`, None for the first model. Raises RequestError 404 (`model_not_found`)."""
        found = self._by_name.get(self.first.name if name is None else name)
        if found is None:
            raise no_such_model(name or "")
        return found

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
