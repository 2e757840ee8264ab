"""The part of the deployment spec for pools: roles, replicas, and engine settings."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.checks.all2all import WITH_MICROBATCHES, WITHOUT_BALANCING, All2AllBackend
from kvasir.config.checks.kv_dtypes import KvDtype, kv_dtype_problem
from kvasir.config.spec.base import Name, Spec
from kvasir.config.spec.engine_args import KV_LAYOUT, EngineArgs
from kvasir.config.spec.scaling import PoolScalingSpec
from kvasir.core.locality import Locality
from kvasir.core.requests import Role
from kvasir.hardware.gpus import gpu_named, gpu_names


class SpeculationStep(Spec):
    """Speculation in batches of at least `batch` requests."""

    batch: int = Field(ge=1, le=4096)
    """Requests in the batch from which on this applies."""
    tokens: int = Field(ge=0, le=16)
    """Tokens proposed per step; 0 proposes none."""


class SpeculativeSpec(Spec):
    """Speculative decoding: tokens are proposed cheaply, and the model verifies them in one step. The output
    follows the same distribution as without it."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "medusa", "mtp"] = "ngram"
    """Source of proposals. `ngram`: text that occurred before (prompt lookup). `draft_model`: a smaller model
    with the same tokenizer. `eagle` and `eagle3`: a head trained for this model. `medusa`: heads trained for
    it, one for each proposed token, without KV. `mtp`: the multi-token prediction layers of the model
    itself."""
    model: str | None = None
    """Folder or Hugging Face id of the draft model or head. `mtp` uses the model itself by default."""
    revision: str = "main"
    """Branch, tag or commit of the draft's Hugging Face repository."""
    tokens: int = Field(default=4, ge=1, le=16)
    """Tokens proposed per step."""
    schedule: tuple[SpeculationStep, ...] = Field(default=(), max_length=16)
    """Fewer tokens in larger batches, where verifying them costs more than it saves. The first entry is for
    `batch: 1`, and `tokens` is the most of any entry. Default: `tokens` in every batch."""
    lookup_max: int = Field(default=4, ge=1, le=32)
    """Longest text to look up, in tokens, for `ngram`."""
    lookup_min: int = Field(default=2, ge=1, le=32)
    """Shortest text to look up, in tokens, for `ngram`."""

    @property
    def keeps_kv(self) -> bool:
        """Whether proposals come from layers with a KV cache of their own."""
        return self.method not in ("ngram", "medusa")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError("lookup_min must not exceed lookup_max")
        if self.method == "ngram" and self.model is not None:
            raise ValueError("model: ngram uses no draft model; remove it, or set method to draft_model")
        if self.method not in ("ngram", "mtp") and self.model is None:
            raise ValueError(f"model: {self.method} needs the folder or Hugging Face id of its draft; set it")
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        batches = [step.batch for step in self.schedule]
        if self.schedule and batches[0] != 1:
            raise ValueError("schedule: the first entry has batch: 1, so that every batch has one")
        if sorted(set(batches)) != batches:
            raise ValueError("schedule: each entry has a larger batch than the one before")
        if self.schedule and max(step.tokens for step in self.schedule) != self.tokens:
            raise ValueError(
                f"schedule: its largest number of tokens must be tokens, which is {self.tokens}; engines "
                "reserve room for that many"
            )


class SimSpec(Spec):
    """Timing of the simulated engine. The defaults resemble a small model on a CPU."""

    prefill_tokens_per_s: float = Field(default=20_000.0, gt=0)
    decode_step_s: float = Field(default=0.004, ge=0)
    decode_step_per_seq_s: float = Field(default=0.0002, ge=0)
    transfer_bytes_per_s: float = Field(default=2e9, gt=0)
    transfer_latency_s: float = Field(default=0.002, ge=0)


class ExpertBalancingSpec(Spec):
    """Expert-parallel load balancing (EPLB): experts that get many tokens are copied, and move between ranks
    while the engine serves."""

    redundant_experts: int = Field(default=0, ge=0, le=1023)
    """Copies beside the model's own experts, in each layer and over all ranks. Experts and copies together
    must divide equally among the ranks."""
    window_steps: int = Field(default=1000, ge=1)
    """Engine steps over which the load of each expert is counted."""
    interval_steps: int = Field(default=3000, ge=1)
    """Engine steps between two rearrangements."""


class EngineSpec(Spec):
    """How each replica of a pool runs the model."""

    kind: Literal["vllm", "sim"] = "vllm"
    """`sim` generates deterministic text with the timing of `sim`, for load and fault tests."""
    block_size: int = Field(default=32, ge=1, le=1024)
    """Tokens per KV block. The CPU build requires multiples of 32."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """KV memory of each rank of a replica. Default: on a GPU, what `gpu_memory_utilization` leaves after
    weights and activations; on a CPU, a share of the free memory, at least one request of `max_model_len`."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the memory of each GPU that a replica uses for weights, activations and KV. For a pool with
    less than one GPU per rank, it is the fraction of that share."""
    kv_dtype: KvDtype = "auto"
    """Numbers of the KV cache. `auto`: the model's dtype. `fp8` is `fp8_e4m3`; `fp8_e5m2` has more range and
    less precision, and on GPUs fewer kernels."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Maximum requests in a batch."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Maximum tokens per step, which is the chunk size of chunked prefill."""
    prefix_caching: bool = True
    kv_events: bool = True
    """Report the blocks in the prefix cache to routers."""
    chunked_prefill: bool = True
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    data_parallel_size: int = Field(default=1, ge=1, le=64)
    nodes: int = Field(default=1, ge=1, le=64)
    """Pods, or bundles in Ray, over which each replica is spread. Its ranks are divided equally: whole
    data-parallel ranks first, then pipeline stages, then the ranks of a stage."""
    unauthenticated_rendezvous: bool = False
    """Let the ranks of several nodes connect without a key. Whoever reaches their ports can then read
    prompts, and run code in the engine."""
    expert_parallel: bool = False
    """Keep whole experts on each of the tensor x data parallel ranks, instead of a part of every expert."""
    all2all_backend: All2AllBackend | None = None
    """Kernels that exchange tokens between the ranks of experts. Default: vLLM's, `allgather_reducescatter`,
    which needs no further package."""
    eplb: ExpertBalancingSpec | None = None
    """Balances the load of experts. Default: experts stay where they are."""
    dual_batch_overlap: bool = False
    """Compute one half of a batch while the tokens of the other are exchanged (DBO)."""
    speculative: SpeculativeSpec | None = None
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per rank. Default: the replica's share of the machine."""
    seed: int = 0
    tool_parser: str | None = None
    """The engine's parser for tool calls of this model, such as `hermes`; `auto` for the one that the model's
    chat template calls for; `none` for no parser. Default: as `auto`, and no parser if none is certain.
    Without one, only forced tool calls work: `tool_choice` is `required` or names a function."""
    reasoning_parser: str | None = None
    """The engine's parser for the reasoning of this model, such as `qwen3`, or `auto`."""
    tool_strictness: Literal["auto", "function", "parameter"] = "auto"
    """What the grammar enforces in tool calls. `auto`: forced calls with their arguments, and the arguments
    of tools with `strict`. `function`: the form of every call. `parameter`: also the arguments of every
    tool."""
    structured_outputs: Literal["auto", "xgrammar", "guidance"] = "auto"
    """Backend that compiles schemas and grammars. `auto` selects one that supports the request."""
    compact_json: bool = True
    """Allow no whitespace between JSON tokens, and at most one character in tool calls of a model's own
    format. With `false`, as in vLLM, a model may generate whitespace until `max_tokens`."""
    complete_outputs: bool = True
    """Near `max_tokens`, complete a structured output with a short text that its grammar allows. With
    `false`, as in vLLM, it is cut off."""
    sim: SimSpec = SimSpec()
    args: EngineArgs = Field(default_factory=dict)
    """Further arguments of the engine, by the names of vLLM's AsyncEngineArgs, such as `attention_backend` or
    `compilation_config`. They are applied last. Arguments that other fields of the spec set are refused."""

    @field_validator("kv_dtype", mode="before")
    @classmethod
    def _a_served_kv_dtype(cls, value: object) -> object:
        if (problem := kv_dtype_problem(value)) is not None:
            raise ValueError(problem)
        return value

    @property
    def ranks(self) -> int:
        """Compute processes per replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def largest_batch(self) -> int:
        """Maximum requests in the batches of a replica: each data-parallel rank has its own."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def nodes_of_copy(self) -> int:
        """Nodes over which the ranks of one copy of the model, a data-parallel rank, are spread."""
        return max(1, self.nodes // self.data_parallel_size)

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the experts of a layer are divided."""
        return self.tensor_parallel_size * self.data_parallel_size

    @model_validator(mode="after")
    def _spread(self) -> Self:
        if self.nodes > 1 and self.kind == "sim":
            raise ValueError("nodes: the simulated engine runs in one process; set nodes to 1")
        if self.ranks % self.nodes:
            raise ValueError(
                f"nodes: {self.ranks} ranks (tensor x pipeline x data parallel) cannot be divided equally "
                f"among {self.nodes} nodes; choose a divisor of the number of ranks"
            )
        fewer, more = sorted((self.nodes, self.data_parallel_size))
        if more % fewer:
            raise ValueError(
                f"nodes: {self.data_parallel_size} data-parallel ranks cannot be spread over {self.nodes} "
                "nodes: a node has whole ranks, or a rank whole nodes; choose numbers of which one divides "
                "the other"
            )
        if self.nodes > 1 and self.data_parallel_size > 1 and self.kv_events and self.prefix_caching:
            raise ValueError(
                "kv_events: data-parallel ranks on other nodes publish no KV events to the worker; set "
                "kv_events to false, so that routers predict what is cached"
            )
        return self

    @model_validator(mode="after")
    def _experts(self) -> Self:
        for field in ("all2all_backend", "eplb", "dual_batch_overlap"):
            if getattr(self, field) and not self.expert_parallel:
                raise ValueError(f"{field}: it needs expert parallelism; set expert_parallel to true")
        if self.eplb is not None and self.expert_ranks == 1:
            raise ValueError(
                "eplb: one rank has all experts; set tensor_parallel_size or data_parallel_size above 1"
            )
        if self.eplb is not None and self.all2all_backend in WITHOUT_BALANCING:
            raise ValueError(
                f"eplb: {self.all2all_backend} cannot move experts between ranks; remove eplb, or choose "
                "another all2all_backend"
            )
        if self.dual_batch_overlap and self.data_parallel_size == 1:
            raise ValueError(
                "dual_batch_overlap: it needs data-parallel ranks; set data_parallel_size above 1"
            )
        if self.dual_batch_overlap and self.all2all_backend not in WITH_MICROBATCHES:
            raise ValueError(
                f"dual_batch_overlap: it needs kernels that run beside others; set all2all_backend to one of "
                f"{', '.join(WITH_MICROBATCHES)}"
            )
        return self


LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=63)]


class TopologySpec(Spec):
    """Where all replicas of a pool run, where a `nodeSelector` or the machine determines it. Unset fields are
    read by each worker from its environment: KVASIR_ZONE, KVASIR_RACK and KVASIR_NVLINK_DOMAIN."""

    zone: LabelValue | None = None
    """Zone, as in the node label `topology.kubernetes.io/zone`."""
    rack: LabelValue | None = None
    """Rack within the zone."""
    nvlink_domain: LabelValue | None = None
    """GPUs that reach each other over NVLink, as in the node label `nvidia.com/gpu.clique`."""

    @property
    def locality(self) -> Locality:
        """What this states of the location of a worker."""
        return Locality(zone=self.zone or "", rack=self.rack or "", nvlink_domain=self.nvlink_domain or "")


class PoolSpec(Spec):
    """Replicas with the same role and engine settings."""

    name: Name
    role: Role
    """Role of the replicas: `prefill`, `decode`, `both`, or `embed` for a model that computes embeddings."""
    model: str | None = None
    """Name of the model that the pool serves. Default: the first model of the deployment."""
    replicas: int = Field(default=1, ge=0, le=1000)
    scaling: PoolScalingSpec | None = None
    """Bounds within which the planner sizes the pool. Unset: the size is `replicas`, or what `kvasir scale`
    sets."""
    engine: EngineSpec = EngineSpec()
    kv_index: Literal["hybrid", "reported", "predicted"] = "hybrid"
    """Source of the prefix index for these workers: their reports, the router's predictions from its own
    decisions, or both, in which case reports take precedence."""
    cpus: float = Field(default=0.5, gt=0)
    """CPU cores reserved in Ray for each replica on each of its nodes."""
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs reserved in Ray for each replica on each of its nodes. Less than 1: the GPU is shared. `auto`: one
    for each rank where `gpu` is named. Otherwise the machine decides on which `kvasir up` runs: with GPUs and
    vLLM's build for them one for each rank, or equal shares where there are too few; without, none. In a
    cluster only `gpu` counts."""
    gpu: str | None = None
    """The GPU that the pool is sized for, such as `H100` or `L4`, where it is not present when the spec is
    checked. Default: the GPUs of the machine."""
    topology: TopologySpec = TopologySpec()

    @model_validator(mode="after")
    def _known_gpu(self) -> Self:
        if self.gpu is not None and gpu_named(self.gpu) is None:
            raise ValueError(f"gpu: {self.gpu} is not in the catalogue; choose one of: {gpu_names()}")
        if self.gpu is not None and not self.gpus:
            raise ValueError(f"gpu: {self.gpu} is named, and gpus is 0; set gpus, or remove gpu")
        return self

    @property
    def reserved_gpus(self) -> float:
        """`gpus` as a number. Where that depends on a machine that nobody has looked at, it is 0."""
        if self.gpus != "auto":
            return self.gpus
        named = self.gpu is not None and self.engine.kind == "vllm"
        return float(self.engine.ranks // self.engine.nodes) if named else 0.0

    @model_validator(mode="after")
    def _begins_within(self) -> Self:
        scaling = self.scaling
        if scaling is not None and not scaling.min <= self.replicas <= scaling.max:
            raise ValueError(
                f"replicas: {self.name} starts with {self.replicas}, outside of the bounds {scaling.min} to "
                f"{scaling.max} of scaling; choose a size within them"
            )
        return self

    @property
    def gpu_utilization(self) -> float:
        """Fraction of a GPU's memory that one rank uses: of the share that it has of the GPU."""
        engine = self.engine
        gpus = self.reserved_gpus
        share = min(1.0, gpus * engine.nodes / engine.ranks) if gpus else 1.0
        return round(engine.gpu_memory_utilization * share, 4)

    @property
    def most(self) -> int:
        """Maximum number of replicas, excluding surge replicas during replacement."""
        return self.replicas if self.scaling is None else self.scaling.max


def check_kv_exchange(pools: tuple[PoolSpec, ...]) -> None:
    """Raise ValueError unless the engines of these pools can read each other's KV blocks."""
    first = pools[0]
    for pool in pools[1:]:
        for field in ("kind", "block_size", "kv_dtype"):
            mine, theirs = getattr(first.engine, field), getattr(pool.engine, field)
            if mine != theirs:
                raise ValueError(
                    f"pools {first.name} and {pool.name} cannot exchange KV: "
                    f"engine.{field} is {mine} and {theirs}; make them equal"
                )
        for name in KV_LAYOUT:
            if first.engine.args.get(name) != pool.engine.args.get(name):
                raise ValueError(
                    f"pools {first.name} and {pool.name} cannot exchange KV: engine.args.{name} changes what "
                    "a KV block holds and differs; make it equal"
                )
    sizes = sorted({pool.engine.tensor_parallel_size for pool in pools})
    for fewer, more in itertools.pairwise(sizes):
        if more % fewer:
            raise ValueError(
                f"pools with engine.tensor_parallel_size {fewer} and {more} cannot exchange KV; choose "
                "sizes so that each divides the next"
            )
