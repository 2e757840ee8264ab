"""Bodies of the calls that load and unload LoRA adapters, with vLLM's fields and a few of ours."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.limits import ModelName, NotServed


class LoadAdapterBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/load_lora_adapter. `lora_path` is a folder on the workers, `s3://BUCKET/PREFIX`, or a Hugging
    Face id with an optional `@REVISION`. `model` is the base model, by default the first that adapters can be
    loaded for; `replicas` is the number of workers of each of its pools, by default all."""

    lora_name: ModelName
    lora_path: Annotated[str, Meta(min_length=1, max_length=1024)]
    model: ModelName | None = None
    replicas: Annotated[int, Meta(ge=1, le=10_000)] | None = None

    load_inplace: NotServed = None
    is_3d_lora_weight: NotServed = None


class UnloadAdapterBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: ModelName

    lora_int_id: NotServed = None
