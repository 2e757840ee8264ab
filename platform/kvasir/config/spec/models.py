"""The part of the deployment spec for models: weights, names and LoRA adapters.

A gateway can serve several models, each with its own pools, adapters and disaggregation. All other settings
are shared.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvasir.config.checks.quantization import Quantization
from kvasir.config.spec.base import Name, Spec
from kvasir.core.adapters import NAME_LIMIT, NAME_PATTERN, pattern_problem

Disaggregated = Literal["always", "auto", "never"]
ModelName = Annotated[str, Field(pattern=NAME_PATTERN, max_length=NAME_LIMIT)]


class LoadSpec(Spec):
    """How workers read weights when they start."""

    format: Literal["auto", "safetensors", "runai_streamer"] = "auto"
    """`auto` reads the files of a folder, and streams weights from object storage. `safetensors` reads no
    other format. `runai_streamer` streams files of a folder too, which requires the package
    runai-model-streamer."""
    strategy: Literal["auto", "prefetch", "lazy", "eager"] = "auto"
    """How safetensors files are read. `prefetch` reads several at a time into the page cache, which all
    workers of a machine share. `lazy` reads a tensor when it is needed. `eager` reads one file after the
    other into the memory of the process. `auto`: `prefetch` if the weights fit into free memory, otherwise
    `lazy`."""
    threads: int = Field(default=8, ge=1, le=256)
    """Maximum files read at the same time, or streams of the streamer."""
    node_cache: str | None = None
    """Folder on a disk of the node, for a `source` on a slower volume. The first worker of a node copies the
    model there, and all workers of the node read the copy. Without room for it, `source` is read."""

    @field_validator("node_cache")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("an absolute path, such as /var/cache/kvasir")
        return value


class WeightsSpec(Spec):
    """Weights to load, and how to load them."""

    source: str = "kvasir-tiny"
    """A folder in Hugging Face format, a Hugging Face id, `kvasir-tiny`, which is included in Kvasir, or a
    folder in object storage, as `s3://bucket/folder`, which requires the package runai-model-streamer."""
    revision: str = "main"
    """Branch, tag or commit of the Hugging Face repository."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | Literal["auto"] = 4096
    """Maximum tokens of prompt and output together. `auto`: as many as the model supports by its config.json.
    The KV cache must hold one request of this length."""
    quantization: Quantization = "none"
    """`none` reads the weights as they are, quantized or not. `int8` quantizes those of Linear layers when
    the worker loads them. The others are methods of vLLM: to quantize at load, such as `fp8`, or to state how
    the checkpoint is quantized, such as `awq`; a checkpoint that is quantized otherwise is refused."""
    chat_template: str | None = None
    """Chat template in place of the model's own: Jinja, or the path of a file with it, which routers and
    workers must both have. Text with `{{` or `{%` is Jinja."""
    control_tokens: Literal["escape", "escape_messages", "allow"] = "escape"
    """Text of clients that reads like a special token. `escape` tokenizes it as ordinary text, in messages,
    prompts and inputs. `escape_messages` does so in chats only, for clients that apply the chat template
    themselves and send prompts. `allow` makes it that token everywhere, like vLLM."""
    generation_config: Literal["auto", "none"] = "auto"
    """`auto` takes temperature, top_p, top_k, min_p and penalties of requests that set none from the model's
    generation_config.json, like vLLM's server. `none` uses OpenAI's defaults."""
    trust_remote_code: bool = False
    """Let the engine run Python code that comes with the model. It runs with all rights of the worker, so set
    it only for a source and revision whose code you have read."""
    matryoshka: bool | None = None
    """Whether the embeddings of the model can be truncated to fewer `dimensions`. Default: as its config.json
    declares. Some models support it without declaring it."""
    load: LoadSpec = LoadSpec()

    @property
    def context_length(self) -> int:
        """`max_model_len` as a number. Raises RuntimeError if that depends on the model's config.json, which
        `kvasir.config.load.model_support.with_length` reads."""
        if self.max_model_len == "auto":
            raise RuntimeError(f"model {self.source}: max_model_len is auto, and has not been resolved")
        return self.max_model_len


class ModelSpec(WeightsSpec):
    """Weights to serve, and the name to serve them under."""

    served_name: str | None = None
    """Name that clients send as `model`. Default: the last path component of `source`."""

    @property
    def name(self) -> str:
        """The name that clients send as `model`."""
        return self.served_name or self.source.rstrip("/").rsplit("/", 1)[-1]


class LoraSpec(Spec):
    """A LoRA adapter, served as a model under its own name."""

    name: Name
    path: str
    rank: int = Field(default=8, ge=1, le=512)


class LoraLoadingSpec(Spec):
    """Loading of LoRA adapters while the deployment runs, by `kvasir lora load` or POST
    /v1/load_lora_adapter. Disabled unless `allow` has an entry."""

    allow: tuple[str, ...] = Field(default=(), max_length=64)
    """Sources that operators may load from: a folder with everything below it, `s3://BUCKET/PREFIX`, a
    Hugging Face id, or `OWNER/` for all repositories of an owner."""
    max_adapters: int = Field(default=4, ge=1, le=64)
    """Adapters that a worker holds at once, in addition to those in `lora`. The engine reserves memory for
    each at its start."""
    max_rank: int = Field(default=16, ge=1, le=512)
    """Largest rank of an adapter. The engine reserves memory for it at its start."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 10, le=1 << 40)
    """Largest size of an adapter's files. Downloads use up to `max_adapters` times as much disk."""
    cache_folder: str | None = Field(default=None, min_length=1)
    """Folder of downloaded adapters on the worker's node. They are deleted when they are unloaded. Default:
    `~/.cache/kvasir/adapters`."""
    timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """How long a call waits until an adapter is loaded, or until requests that use it have ended."""

    @field_validator("allow")
    @classmethod
    def _valid_sources(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for entry in allow:
            if problem := pattern_problem(entry):
                raise ValueError(problem)
        return allow

    @property
    def enabled(self) -> bool:
        """Whether adapters can be loaded."""
        return bool(self.allow)


class FurtherModelSpec(WeightsSpec):
    """An additional model behind the same gateway. Pools that serve it have its name in `model`."""

    name: ModelName
    """Name that clients send as `model`."""
    lora: tuple[LoraSpec, ...] = ()
    """Adapters of the model. Their names must differ from those of all other models and adapters."""
    lora_loading: LoraLoadingSpec = LoraLoadingSpec()
    disaggregation: Disaggregated | None = None
    """Default: `disaggregation` of the deployment."""

    @property
    def model(self) -> ModelSpec:
        """The weights and name as a ModelSpec."""
        weights = {name: getattr(self, name) for name in WeightsSpec.model_fields}
        return ModelSpec(served_name=self.name, **weights)
