"""The model of a plan: its files or its configuration alone, and the work of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvasir.checkpoint.architectures import kind_of
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.performance.device import reference_device
from kvasir.performance.precision import precision_of
from kvasir.performance.work import ModelWork, model_work
from kvasir.sizing.dimensions import dimensions
from kvasir.sizing.fit import ModelFiles
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import WeightKind, WeightPart
from kvasir_platform.capacity.known_models import KNOWN_MODELS, KnownModel


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """`source` is what kvasir.yaml names. `estimated`: weights are counted from config.json, because there
    are no headers of weight files."""

    name: str
    source: str
    files: ModelFiles
    work: ModelWork
    embeds: bool = False
    estimated: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.files.config

    @property
    def heads(self) -> int:
        """Query heads, which tensor parallelism divides."""
        return dimensions(self.config).heads

    @property
    def mixture(self) -> bool:
        """Whether it has experts."""
        return self.work.experts > 0


def planned_model(
    name: str, source: str, config: ModelConfig, weights: tuple[WeightPart, ...] = ()
) -> PlannedModel:
    """Return the model that `config` describes; without `weights`, they are counted from it."""
    work = model_work(config)
    files = ModelFiles(config, weights or tuple(_weights(config, work)))
    embeds = kind_of(config.architectures) in ("pooling", "scoring")
    return PlannedModel(name, source, files, work, embeds=embeds, estimated=not weights)


def known_model(name: str) -> PlannedModel | None:
    """Return the built-in model of this name or Hugging Face id, None if there is none."""
    wanted = name.lower()
    for short, known in KNOWN_MODELS.items():
        if wanted in (short, known.source.lower()):
            return planned_model(short, known.source, _config(known))
    return None


def _config(known: KnownModel) -> ModelConfig:
    return ModelConfig(Path(known.source), known.values, known.values.get("text_config", known.values))


def _weights(config: ModelConfig, work: ModelWork) -> Iterator[WeightPart]:
    quantized = config.quantization is not None
    # What is stored does not depend on the device.
    found = precision_of(config, work, EngineShape(), reference_device(""))
    sizes = dimensions(config)
    packed = str((config.quantization or {}).get("quant_method", "")) == "mxfp4"
    dense_stored = found.weight_bytes if quantized and not packed else None
    for layer in range(work.layers):
        yield _part(WeightKind.LINEAR, layer, work.dense / work.layers, sizes.hidden, dense_stored)
        if work.layers - layer > work.expert_layers:
            continue
        count = work.expert * work.experts
        if packed:
            # The engine pads what is packed.
            size = round(count * found.expert_bytes)
            yield WeightPart(WeightKind.EXPERT, layer, last=False, packed=size)
        else:
            stored = found.expert_bytes if quantized else None
            yield _part(WeightKind.EXPERT, layer, count, sizes.hidden, stored)
    table = sizes.vocabulary * sizes.hidden
    yield WeightPart(WeightKind.EMBEDDING, None, last=False, elements=table)
    if work.embedding and work.head:
        yield WeightPart(WeightKind.HEAD, None, last=True, elements=table)


def _part(kind: WeightKind, layer: int, count: float, hidden: int, stored: float | None) -> WeightPart:
    if stored is not None:
        return WeightPart(kind, layer, last=False, fixed=round(count * stored))
    elements = round(count)
    rows = elements // max(1, hidden)
    return WeightPart(kind, layer, last=False, elements=elements, linear_elements=elements, linear_rows=rows)
