"""The deployment spec's part about models: which weights are served, and under which names.

One gateway serves several models, each with pools, adapters and a way to disaggregate of its own. Everything
else of a deployment they share, so that a file with one model says nothing of this.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvasir.config.spec.base import Name, Spec

Disaggregated = Literal["always", "auto", "never"]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9._:/@+]*$", max_length=256)]


class WeightsSpec(Spec):
    """Which weights to load, and how."""

    source: str = "kvasir-tiny"
    """A folder in Hugging Face form, a Hugging Face id, or `kvasir-tiny`, which ships with Kvasir."""
    revision: str = "main"
    """Branch, tag or commit of a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations."""
    max_model_len: int = Field(default=4096, ge=16, le=10_000_000)
    """Prompt and output together, in tokens."""
    quantization: Literal["none", "int8"] = "none"
    """`int8` quantizes Linear weights at load, on the worker."""
    matryoshka: bool | None = None
    """Whether the embeddings of the model stay good when clients ask for fewer `dimensions`. By default what
    its config.json says; some models were trained for it and do not say so."""


class ModelSpec(WeightsSpec):
    """Which weights to serve, and under which name."""

    served_name: str | None = None
    """The name that clients send as `model`; by default the source's last part."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.source.rstrip("/").rsplit("/", 1)[-1]


class LoraSpec(Spec):
    """One LoRA adapter, served as a model of its own name."""

    name: Name
    path: str
    rank: int = Field(default=8, ge=1, le=512)


class FurtherModelSpec(WeightsSpec):
    """One more model behind the same gateway. The pools that serve it name it as their `model`."""

    name: ModelName
    """What clients send as `model`."""
    lora: tuple[LoraSpec, ...] = ()
    """Its own adapters; their names differ from those of all models and adapters."""
    disaggregation: Disaggregated | None = None
    """As the deployment's own, which it is by default."""

    @property
    def model(self) -> ModelSpec:
        """The same weights and name, as of a deployment's only model."""
        weights = {name: getattr(self, name) for name in WeightsSpec.model_fields}
        return ModelSpec(served_name=self.name, **weights)
