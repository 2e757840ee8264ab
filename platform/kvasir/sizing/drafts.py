"""What speculative decoding adds to an engine's memory: a draft model, a head, or prediction layers.

vLLM loads them on the ranks of the last pipeline stage, divided as the model is, in the model's dtype. Their
attention layers keep KV in the same blocks as the model's. An EAGLE head without an embedding or a head for
the vocabulary uses the model's, and prediction layers always do (`SpecDecodeBaseProposer.load_model`).
Medusa's residual blocks are whole on each rank. What a checkpoint holds is counted, although vLLM shares
copies that equal the model's. N-gram lookup adds nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvasir.checkpoint.attention import FULL, LayerCache, LayerKind, layer_caches
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import count
from kvasir.checkpoint.tensors import TensorHeader
from kvasir.sizing.dimensions import dimensions
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import WeightKind, WeightPart, rank_weights, weight_parts

MEDUSA = "medusa"
_PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_PREFIX = re.compile(r"^(?:model\.)?mtp\.")
_LAYER = re.compile(r"((?:^|\.)layers\.)(\d+)(\.)")
_SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|shared_head\.head|lm_head)\.")
_MEDUSA_HEAD = re.compile(r"^(?:medusa_heads\.)?(?:lm_heads?\.|\d+\.\d+\.weight$)")
"""Heads for the vocabulary: `lm_heads.0.weight`, or `0.1.weight` in checkpoints of FasterDecoding/Medusa."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes tokens: its configuration, the weights that ranks divide, and what each of its layers
    keeps of a request's tokens."""

    config: ModelConfig
    weights: tuple[WeightPart, ...]
    caches: tuple[LayerCache, ...]


def draft_model(config: ModelConfig, weights: tuple[WeightPart, ...]) -> Draft:
    """Return a draft model or an EAGLE head of this configuration and these weights."""
    return Draft(config, weights, layer_caches(config))


def medusa_heads(config: ModelConfig, predictors: tuple[WeightPart, ...]) -> Draft:
    """Return Medusa's heads, of what `predictor_parts` returns of their checkpoint."""
    return Draft(config, predictors, ())


def prediction_layers(config: ModelConfig, predictors: tuple[WeightPart, ...]) -> Draft:
    """Return the multi-token prediction layers of the model with `config`, of what `predictor_parts` returns
    of its checkpoint. Their attention is the model's, of every token."""
    latent = next((each for each in layer_caches(config) if each.kind is LayerKind.MLA), FULL)
    return Draft(config, predictors, (latent,) * max(1, count(config.text, *_PREDICTED)))


def predictor_parts(config: ModelConfig, tensors: Iterable[TensorHeader]) -> tuple[WeightPart, ...]:
    """Return the sums of what a checkpoint has to predict further tokens and `weight_parts` leaves out, which
    is all of it for Medusa's heads."""
    if config.text_type == MEDUSA:
        return tuple(map(_medusa_part, tensors))
    if not count(config.text, *_PREDICTED):
        return ()
    return weight_parts(config, _predictors(config, tensors))


def _medusa_part(tensor: TensorHeader) -> WeightPart:
    kind = WeightKind.HEAD if _MEDUSA_HEAD.search(tensor.name) else WeightKind.WHOLE
    return WeightPart(kind, None, last=True, elements=math.prod(tensor.shape))


def _predictors(config: ModelConfig, tensors: Iterable[TensorHeader]) -> Iterator[TensorHeader]:
    layers = dimensions(config).layers
    for tensor in tensors:
        within, layer = _PREFIX.sub("", tensor.name), _LAYER.search(tensor.name)
        beyond = layer is not None and int(layer.group(2)) >= layers
        if (within != tensor.name or beyond) and not _SHARED.search(within):
            # With the number of a layer that the model has, it is not left out.
            name = _LAYER.sub(r"\g<1>0\3", within)
            yield TensorHeader(name, tensor.dtype, tensor.shape, tensor.nbytes, tensor.file)


def draft_bytes(draft: Draft, target: tuple[WeightPart, ...], shape: EngineShape) -> int:
    """Return the bytes of its weights on a rank of the last stage, beside a model with weights `target`."""
    alone = replace(shape, pipeline=1, quantization="none", adapters=0)
    (held,) = rank_weights(draft.config, draft.weights, alone)
    has_embedding = any(part.kind is WeightKind.EMBEDDING for part in draft.weights)
    if shape.pipeline > 1 and draft.caches and not has_embedding:
        # The model's is on the first stage.
        embedding = tuple(part for part in target if part.kind is WeightKind.EMBEDDING)
        held += sum(rank_weights(draft.config, embedding, alone))
    return held
