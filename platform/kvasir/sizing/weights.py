"""The weights that each rank holds, from the tensors of a checkpoint.

Tensors are recognized by their names, which follow transformers. Tensor parallelism divides linear layers,
embeddings and the language model's head, and every rank holds norms, routers and MLA's projections to its
latents. Pipeline parallelism divides layers. Experts are divided among all ranks of tensor and data
parallelism: whole ones with expert parallelism, each in parts otherwise. Experts that every token passes are
linear layers as others.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.tensors import TensorHeader
from kvasir.sizing.dimensions import Dimensions, dimensions
from kvasir.sizing.matrices import divides_inputs, linear_sizes
from kvasir.sizing.shape import EngineShape, element_bytes, stages


class WeightKind(Enum):
    """How ranks divide a tensor."""

    LINEAR = "linear"
    KEYS = "keys"
    EXPERT = "expert"
    EMBEDDING = "embedding"
    HEAD = "head"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class _Class:
    """What tensors with the same name, numbers aside, have in common. `last` ones are after all layers, and
    `tower` ones belong to a model beside the language model."""

    kind: WeightKind
    last: bool
    tower: bool


@dataclass(frozen=True, slots=True)
class WeightPart:
    """All tensors of one kind in one layer, None for those outside of layers. `fixed` bytes are served as
    stored, and of `packed` bytes each dimension is padded. `elements` are numbers that are served in the
    engine's dtype, of which `linear_elements` in `linear_rows` rows can be quantized when they are loaded.
    `divided_sizes` are the inputs or outputs of linear layers that ranks divide as the tensor, and
    `whole_sizes` those that they do not."""

    kind: WeightKind
    layer: int | None
    last: bool
    fixed: int = 0
    packed: int = 0
    elements: int = 0
    linear_elements: int = 0
    linear_rows: int = 0
    whole_sizes: int = 0
    divided_sizes: int = 0


_DIGITS = re.compile(r"\d+")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|[._])(?<!shared_)experts\b")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|embedding)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out)\.")
_LAST = re.compile(r"(?:^|\.)(?:norm|ln_f|final_layernorm)\.")
_KEYS = re.compile(r"\.(?:k_proj|v_proj)\.")
_WHOLE = re.compile(
    r"norm|router|rotary|position_embeddings|\.wpe\.|(?:^|\.)gate\.weight$|shared_expert_gate|q_a_proj|kv_a_proj"
    r"|\.indexer\."
)
_TOWER = re.compile(r"^(?:model\.)?(?:vision|visual|audio|image)|vision_tower|vision_model|audio_tower")
_PREDICTOR = re.compile(r"^(?:model\.)?mtp\.")
"""Layers that predict further tokens, which are loaded only to speculate."""
_FLOATS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
_MXFP4_HIDDEN, _MXFP4_WIDTH = 256, 128
"""What vLLM's Marlin kernels round the dimensions of MXFP4 experts up to."""


def weight_parts(config: ModelConfig, tensors: Iterable[TensorHeader]) -> tuple[WeightPart, ...]:
    """Return the sums of the tensors that an engine loads."""
    layers = dimensions(config).layers
    quantized = config.quantization is not None
    mxfp4 = quantized and str((config.quantization or {}).get("quant_method", "")) == "mxfp4"
    sums: dict[tuple[WeightKind, int | None, bool], list[int]] = defaultdict(lambda: [0] * 7)
    for tensor in tensors:
        found = _classified(_DIGITS.sub("#", tensor.name), len(tensor.shape) > 1)
        if found is None:
            continue
        layer = None if found.tower or not (match := _LAYER.search(tensor.name)) else int(match.group(1))
        if layer is not None and layer >= layers:
            # Layers beyond the model's predict further tokens, as DeepSeek's 62nd.
            continue
        total = sums[found.kind, layer, found.last]
        size = _FLOATS.get(tensor.dtype)
        if mxfp4 and found.kind is WeightKind.EXPERT and len(tensor.shape) > 2:
            total[1] += tensor.nbytes
        elif size is None or (quantized and "scale" in tensor.name):
            total[0] += tensor.nbytes
        else:
            total[2] += tensor.nbytes // size
            if not quantized and len(tensor.shape) > 1 and not found.tower and found.kind in _QUANTIZABLE:
                total[3] += tensor.nbytes // size
                total[4] += math.prod(tensor.shape[:-1])
        if not found.tower:
            inputs, outputs = linear_sizes(tensor, config.quantization)
            by_inputs = divides_inputs(tensor.name)
            total[5] += outputs if by_inputs else inputs
            total[6] += inputs if by_inputs else outputs
    return tuple(WeightPart(*key, *total) for key, total in sums.items())


def stated_parts(nbytes: int) -> tuple[WeightPart, ...]:
    """Return parts for weights of which only the sum is known, as if all were linear layers."""
    return (WeightPart(WeightKind.LINEAR, None, last=False, fixed=nbytes),) if nbytes else ()


_QUANTIZABLE = (WeightKind.LINEAR, WeightKind.KEYS, WeightKind.EXPERT)


@functools.lru_cache(maxsize=4096)
def _classified(name: str, matrix: bool) -> _Class | None:
    """Return the class of tensors with this name, in which numbers are replaced; None if none is loaded."""
    if _PREDICTOR.search(name):
        return None
    tower, head = _TOWER.search(name) is not None, _HEAD.search(name) is not None
    in_layer = re.search(r"(?:^|\.)(?:layers|h|blocks)\.#\.", name) is not None
    last = not tower and not in_layer and (head or _LAST.search(name) is not None)
    kind = WeightKind.LINEAR
    if _EXPERT.search(name) and matrix:
        kind = WeightKind.EXPERT
    elif head:
        kind = WeightKind.HEAD
    elif not matrix or _WHOLE.search(name):
        kind = WeightKind.WHOLE
    elif _EMBEDDING.search(name):
        kind = WeightKind.EMBEDDING
    elif _KEYS.search(name):
        kind = WeightKind.KEYS
    return _Class(kind, last, tower)


def rank_weights(config: ModelConfig, parts: Sequence[WeightPart], shape: EngineShape) -> tuple[int, ...]:
    """Return the bytes of weights on a rank of each pipeline stage."""
    sizes = dimensions(config)
    divided = stages(sizes.layers, shape.pipeline)
    has_head = any(part.kind is WeightKind.HEAD for part in parts)
    tied = config.text.get("tie_word_embeddings", not has_head) is True
    held = [0] * shape.pipeline
    served = _ServedBytes.of(sizes, shape)
    shares = {kind: rank_share(kind, sizes, shape) for kind in WeightKind}
    for part in parts:
        if tied and part.kind is WeightKind.HEAD:
            continue
        size = math.ceil(served.of_part(part) * shares[part.kind])
        held[stage_of(part, divided)] += size
        if tied and shape.pipeline > 1 and part.kind is WeightKind.EMBEDDING:
            held[-1] += size
    return tuple(held)


def stage_of(part: WeightPart, divided: Sequence[range]) -> int:
    """Return the pipeline stage that holds a part, given the layers of each stage."""
    if len(divided) == 1:
        return 0
    if part.layer is None:
        return len(divided) - 1 if part.last else 0
    return next(stage for stage, layers in enumerate(divided) if part.layer in layers)


class _ServedBytes(NamedTuple):
    """How many bytes an element takes in the dtype in which it is served, and MXFP4 with its padding relative
    to what is stored."""

    element: int
    padding: float
    quantizes: bool

    @classmethod
    def of(cls, sizes: Dimensions, shape: EngineShape) -> _ServedBytes:
        """Those of an engine."""
        return cls(element_bytes(shape.dtype), _mxfp4_padding(sizes, shape), shape.quantization != "none")

    def of_part(self, part: WeightPart) -> float:
        """Return the bytes of all ranks together."""
        quantized = part.linear_elements if self.quantizes else 0
        # One byte, and a float32 scale for each row.
        online = quantized + 4 * part.linear_rows * (quantized > 0)
        plain = (part.elements - quantized) * self.element
        return part.fixed + part.packed * self.padding + online + plain


def _mxfp4_padding(sizes: Dimensions, shape: EngineShape) -> float:
    if not sizes.expert_size or not sizes.hidden:
        return 1.0
    parts = 1 if shape.expert_parallel else shape.tensor * shape.data
    width = _rounded(-(-sizes.expert_size // parts), _MXFP4_WIDTH) * parts
    return _rounded(sizes.hidden, _MXFP4_HIDDEN) / sizes.hidden * width / sizes.expert_size


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def rank_share(kind: WeightKind, sizes: Dimensions, shape: EngineShape) -> float:
    """Return the part of a tensor of this kind that one rank holds."""
    match kind:
        case WeightKind.WHOLE:
            return 1.0
        case WeightKind.KEYS:
            return 1 / min(shape.tensor, max(1, sizes.kv_heads))
        case WeightKind.EXPERT:
            ranks = shape.tensor * shape.data
            if shape.expert_parallel and sizes.experts:
                return -(-(sizes.experts + shape.redundant_experts) // ranks) / sizes.experts
            return 1 / ranks
        case _:
            return 1 / shape.tensor
