"""How a model's authors sample from it: the values that requests get if they set none.

vLLM's server takes them from generation_config.json too, so that the same request gives the same output here
and there. Token ids that end the output are in the same file; the engine reads those itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from kvasir.checkpoint.json_file import read_json


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters of requests that set none. The defaults are vLLM's, which change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = SamplingDefaults()
"""Sampling from the model's distribution as it is."""


class _Stated(Struct):
    """What generation_config.json may say of sampling."""

    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the defaults of the model in `folder`, NEUTRAL if it has no generation_config.json. Raises
    ConfigError, which names the file, for a value outside vLLM's range."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return NEUTRAL
    found = read_json(path, _Stated)
    stated = {name: getattr(found, name) for name in found.__struct_fields__}
    values = {name: value for name, value in stated.items() if value is not None}
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])
    return SamplingDefaults(**values)
