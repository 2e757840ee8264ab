"""The models that a gateway serves, with the tokenizer, context length and capabilities of each.

Every call looks up its model or adapter by name, so one dict holds both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvasir.checkpoint.media.rules import MediaRules
from kvasir.checkpoint.sampling_defaults import NEUTRAL, SamplingDefaults
from kvasir.config.load.model_files import Matryoshka
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import RequestError
from kvasir.ports.router import AdapterCatalog
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities, model_capabilities
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens
from kvasir_platform.gateway.prompt.pairs import Classifier
from kvasir_platform.gateway.prompt.tokenization import Tokenizer, TokenizerPool


@dataclass(frozen=True, slots=True)
class EdgeModel:
    """One model. `context` is in tokens; `matryoshka` holds the dimensions that embeddings may be cut to,
    None if they cannot be cut; `defaults` are for requests that set no sampling parameters. `control_tokens`
    is ModelSpec's. `classifier` is None unless the model classifies."""

    name: str
    context: int
    adapters: tuple[str, ...]
    capabilities: ModelCapabilities
    tokenizers: TokenizerPool
    matryoshka: Matryoshka | None = None
    defaults: SamplingDefaults = NEUTRAL
    control_tokens: str = "escape"
    classifier: Classifier | None = None

    @classmethod
    def of(
        cls,
        view: Deployment,
        tokenizer: Tokenizer | TokenizerPool,
        matryoshka: Matryoshka | None = None,
        defaults: SamplingDefaults = NEUTRAL,
        classifier: Classifier | None = None,
        *,
        media: MediaRules | None = None,
    ) -> EdgeModel:
        """Return the model of a single-model deployment, whose `max_model_len` is a number. Models with the
        same tokenizer may share a pool. `media` is None for a model of text only."""
        return cls(
            name=view.model.name,
            context=view.model.context_length,
            adapters=tuple(lora.name for lora in view.lora),
            capabilities=model_capabilities(view, classifies=classifier is not None, rules=media),
            tokenizers=tokenizer if isinstance(tokenizer, TokenizerPool) else TokenizerPool(tokenizer),
            matryoshka=matryoshka,
            defaults=defaults,
            control_tokens=view.model.control_tokens,
            classifier=classifier,
        )

    @property
    def control_in_chats(self) -> ControlTokens | None:
        """The special tokens that are ordinary text in what clients write in chats; None: they are special
        there too."""
        return None if self.control_tokens == "allow" else self.tokenizer.control

    @property
    def control_in_prompts(self) -> ControlTokens | None:
        """As `control_in_chats`, for prompts and inputs."""
        return self.tokenizer.control if self.control_tokens == "escape" else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the chat template."""
        return self.tokenizers.tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and optionally one of its LoRA adapters, as named by a client's `model` field. `adapter` is
    what the router calls it: the key of one that was loaded at run time."""

    model: EdgeModel
    adapter: str | None = None


class ModelTable:
    """The models of a gateway, and those adapters in `loaded` whose names are free. `first` serves the calls
    that may leave the model out; `names` are those of models and adapters in the spec.
    `routes` has the model or adapter behind each route, for calls that a route does not distribute."""

    def __init__(self, models: Iterable[EdgeModel]) -> None:
        self.models = tuple(models)
        self.first = self.models[0]
        self._by_name = {model.name: Served(model) for model in self.models}
        self._by_name |= {name: Served(model, name) for model in self.models for name in model.adapters}
        self.names = tuple(self._by_name)
        self.routes: Mapping[str, str] = {}
        self.loaded: AdapterCatalog | None = None

    def find(self, name: str | None) -> Served:
        """Return what serves `name`, the first model for None. Raise RequestError 404 (`model_not_found`)."""
        wanted = self.first.name if name is None else name
        found = self._by_name.get(wanted) or self._loaded(wanted)
        if found is None and wanted in self.routes:
            found = self._by_name.get(self.routes[wanted])
        if found is None:
            raise no_such_model(wanted)
        return found

    def listed(self) -> tuple[str, ...]:
        """Return the names that can be served at present: models and adapters, routes, and loaded
        adapters."""
        loaded = () if self.loaded is None else sorted(self.loaded.served())
        return (*self.names, *self.routes, *(name for name in loaded if self._loaded(name) is not None))

    def _loaded(self, name: str) -> Served | None:
        adapter = None if self.loaded is None else self.loaded.served().get(name)
        model = None if adapter is None else self._by_name.get(adapter.model)
        if adapter is None or model is None or name in self._by_name:
            return None
        return Served(model.model, adapter.key)

    def close(self) -> None:
        """Stop the threads of all tokenizers. Idempotent."""
        for model in self.models:
            model.tokenizers.close()


def no_such_model(name: str) -> RequestError:
    """Return the error for a model that is not served."""
    return RequestError(
        f"The model {name[:256]!r} does not exist here; GET /v1/models lists what does.",
        status=404,
        code="model_not_found",
        param="model",
    )
