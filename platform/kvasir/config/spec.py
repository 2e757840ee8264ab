"""The deployment spec, `kvasir.yaml`: everything a deployment is, in one validated file.

One model tree serves the command line, the chart and the planner, and its JSON schema is dumped from
it. Each field's description is its documentation. What cannot work is refused here, with the reason,
before a process starts.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvasir.core.requests import Role

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]

_COLLECTOR = re.compile(
    r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)


def is_loopback(host: str) -> bool:
    """Whether what binds to `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSpec(_Spec):
    """Which weights to serve, and under which name."""

    source: str = "kvasir-tiny"
    """A folder in Hugging Face form, a Hugging Face id, or `kvasir-tiny`, which ships with Kvasir."""
    revision: str = "main"
    """Branch, tag or commit of a Hugging Face id."""
    served_name: str | None = None
    """The name that clients send as `model`; by default the source's last part."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations."""
    max_model_len: int = Field(default=4096, ge=16, le=10_000_000)
    """Prompt and output together, in tokens."""
    quantization: Literal["none", "int8"] = "none"
    """`int8` quantizes Linear weights at load, on the worker."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.source.rstrip("/").rsplit("/", 1)[-1]


class LoraSpec(_Spec):
    """One LoRA adapter, served as a model of its own name."""

    name: Name
    path: str
    rank: int = Field(default=8, ge=1, le=512)


class SpeculativeSpec(_Spec):
    """Speculative decoding by prompt look-up (n-gram), which needs no draft model."""

    method: Literal["ngram"] = "ngram"
    tokens: int = Field(default=4, ge=1, le=16)
    """Tokens proposed a step."""
    lookup_max: int = Field(default=4, ge=1, le=32)
    lookup_min: int = Field(default=2, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError("lookup_min must not exceed lookup_max")
        return self


class SimSpec(_Spec):
    """Timing of the simulated engine; the defaults resemble a small model on a CPU."""

    prefill_tokens_per_s: float = Field(default=20_000.0, gt=0)
    decode_step_s: float = Field(default=0.004, ge=0)
    decode_step_per_seq_s: float = Field(default=0.0002, ge=0)
    transfer_bytes_per_s: float = Field(default=2e9, gt=0)
    transfer_latency_s: float = Field(default=0.002, ge=0)


class EngineSpec(_Spec):
    """How each replica of a pool runs the model."""

    kind: Literal["vllm", "sim"] = "vllm"
    """`sim` answers deterministic text with the timing of `sim`, for load and fault tests."""
    block_size: int = Field(default=32, ge=1, le=1024)
    """KV block in tokens; the CPU build wants multiples of 32."""
    kv_cache_bytes: int = Field(default=128 << 20, ge=1 << 20)
    """KV memory per replica and rank."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Requests in one batch."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Tokens a step may compute: the chunk of chunked prefill."""
    prefix_caching: bool = True
    kv_events: bool = True
    """Report to routers which blocks the prefix cache holds."""
    chunked_prefill: bool = True
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    data_parallel_size: int = Field(default=1, ge=1, le=64)
    expert_parallel: bool = False
    speculative: SpeculativeSpec | None = None
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per rank; by default the replica's share of the machine."""
    seed: int = 0
    sim: SimSpec = SimSpec()


class PoolSpec(_Spec):
    """Replicas that do the same part of the work."""

    name: Name
    role: Role
    replicas: int = Field(default=1, ge=0, le=1000)
    engine: EngineSpec = EngineSpec()
    kv_index: Literal["hybrid", "reported", "predicted"] = "hybrid"
    """How the router knows what these workers hold: what they report, what it foresees from its own
    decisions, or both, the report winning."""
    cpus: float = Field(default=0.5, gt=0)
    """CPU cores reserved in Ray for each replica."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs reserved in Ray for each replica."""


class TransferSpec(_Spec):
    """How KV moves from prefill to decode."""

    kind: Literal["nixl"] = "nixl"
    host: str = "127.0.0.1"
    """Address that the prefill worker's transfer agent binds and tells its peers."""
    lease_s: float = Field(default=20.0, gt=0, le=600)
    """How long a prefill worker keeps blocks that nobody pulled."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """A pull that takes longer has failed."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What the decode worker does when KV did not arrive."""

    @model_validator(mode="after")
    def _pulled_while_leased(self) -> Self:
        if self.timeout_s > self.lease_s:
            raise ValueError(
                f"timeout_s {self.timeout_s:g} exceeds lease_s {self.lease_s:g}: the blocks would be given "
                "up while they are being pulled; lower timeout_s or raise lease_s"
            )
        return self


class WorkerSpec(_Spec):
    """The workers' session server."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback, a worker does not start without `session_token_file`."""
    session_token_file: str | None = None
    """Shared secret of routers and workers. `--token-file` of their processes wins over it, and `kvasir
    up` makes one when it is unset."""
    resume_window_s: float = Field(default=10.0, gt=0, le=300)
    """How long a broken session is kept for its router to return."""
    tail_messages: int = Field(default=4096, ge=64, le=1_000_000)
    """Unacknowledged step batches kept per session."""
    drain_s: float = Field(default=20.0, ge=0, le=3600)
    """How long a worker that is being stopped lets its streams come to their end."""


class RoutingSpec(_Spec):
    """The router's policy, index and queue."""

    policy: Literal[
        "cost",
        "round_robin",
        "least_loaded",
        "power_of_two",
        "session",
        "consistent_hash",
        "prefix",
        "dynamo",
        "llm_d",
        "sglang",
        "mooncake",
        "production_stack",
    ] = "cost"
    """`cost` weighs prefix hits, queues, transfers and batch sizes in seconds. The others are for
    comparison and for those who want them: classics, and the published formulas of other routers."""
    index_blocks: int = Field(default=10_000_000, ge=1024, le=100_000_000)
    """Blocks the prefix index holds at most, counted once for each worker and tier that holds them; at
    most 48 bytes of memory each. A worker that does not fit in is routed to by prediction."""
    predicted_blocks: int = Field(default=1_000_000, ge=1024, le=100_000_000)
    """How many of them may be predictions; beyond it the oldest are forgotten."""
    predicted_ttl_s: float = Field(default=300.0, gt=0)
    """How long the router believes that a worker still holds what it was sent, if the worker does not
    report what it holds."""
    decision_records: int = Field(default=4096, ge=0, le=1_000_000)
    """Decisions kept for `kvasir explain`, the newest ones."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request waits for a worker before 503."""
    max_queue: int = Field(default=1024, ge=1)
    """Requests that may wait for a worker; more are answered 503."""
    max_in_flight: int = Field(default=4096, ge=1)
    """Requests in the system at once; more are answered 503."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """How often a request that has not emitted a token is started again elsewhere."""


class SloSpec(_Spec):
    """A service level that requests can ask for by name; the first one is the default."""

    name: Name
    ttft_s: float = Field(default=2.0, gt=0)
    """Time to first token."""
    itl_s: float = Field(default=0.1, gt=0)
    """Time between two tokens."""


class GatewaySpec(_Spec):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback, `api_keys_file` is required."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port."""
    api_keys_file: str | None = None
    """One SHA-256 (hex) of an API key a line; `#` starts a comment. Unset: no key is asked for."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_header_bytes: int = Field(default=64 << 10, ge=1024)
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Request line and headers must be complete this long after their first byte."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """The body must be complete this long after the headers."""
    idle_timeout_s: float = Field(default=75.0, gt=0)
    """How long a connection without a request is kept."""
    max_connections: int = Field(default=4096, ge=1)
    """More are answered 503 and closed."""
    stream_buffer_bytes: int = Field(default=256 << 10, ge=4096)
    """Output that may wait for a slow client; a stream that exceeds it is cut."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long requests in flight may go on when the gateway stops."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """A request that takes longer in all is ended with 504."""
    default_max_tokens: int = Field(default=256, ge=1)
    """Output limit of a request that names none."""

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not is_loopback(self.host) and self.api_keys_file is None:
            raise ValueError(
                f"host {self.host} is open to the network: name an api_keys_file, or bind 127.0.0.1"
            )
        return self


class TelemetrySpec(_Spec):
    """Metrics are always served on the gateway at /metrics; traces are off by default."""

    otlp_endpoint: str | None = None
    """gRPC address of an OpenTelemetry collector, `host:port` or `http(s)://host:port`. Unset: no spans
    are made."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("otlp_endpoint")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _COLLECTOR.fullmatch(value)
        if address is None or not 0 < int(address[1]) <= 65535:
            raise ValueError("host:port, http://host:port or https://host:port, as in localhost:4317")
        return value


class DiscoverySpec(_Spec):
    """How the router finds workers."""

    kind: Literal["ray", "static"] = "ray"
    endpoints: tuple[str, ...] = ()
    """For `static`: `pool=host:port`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "static" and not self.endpoints:
            raise ValueError("static discovery needs endpoints, each `pool=host:port`")
        for endpoint in self.endpoints:
            pool, eq, address = endpoint.partition("=")
            host, colon, port = address.rpartition(":")
            if not (pool and eq and host and colon and port.isdigit()):
                raise ValueError(f"endpoint {endpoint!r} is not `pool=host:port`")
        return self


def _default_pools() -> tuple[PoolSpec, ...]:
    return (
        PoolSpec(name="prefill", role=Role.PREFILL),
        PoolSpec(name="decode", role=Role.DECODE),
    )


class Deployment(_Spec):
    """The whole of `kvasir.yaml`. `Deployment()` is the embedded default."""

    version: Literal["kvasir/v1"] = "kvasir/v1"
    name: Name = "kvasir"
    model: ModelSpec = ModelSpec()
    lora: tuple[LoraSpec, ...] = ()
    disaggregation: Literal["always", "auto", "never"] = "always"
    """`always` prefills and decodes apart, `auto` follows the cost model, `never` runs a request on
    one worker."""
    pools: tuple[PoolSpec, ...] = Field(default_factory=_default_pools, min_length=1)
    transfer: TransferSpec = TransferSpec()
    worker: WorkerSpec = WorkerSpec()
    routing: RoutingSpec = RoutingSpec()
    slo: tuple[SloSpec, ...] = Field(default=(SloSpec(name="default"),), min_length=1)
    gateway: GatewaySpec = GatewaySpec()
    discovery: DiscoverySpec = DiscoverySpec()
    telemetry: TelemetrySpec = TelemetrySpec()

    def pool(self, name: str) -> PoolSpec:
        """The pool of that name; raises KeyError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    @property
    def disaggregated(self) -> bool:
        """Whether KV may have to move."""
        return self.disaggregation != "never"

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, found {names}")
        roles = {pool.role for pool in self.pools}
        if self.disaggregation == "always" and not {Role.PREFILL, Role.DECODE} <= roles:
            raise ValueError(
                "disaggregation: always needs a pool of role prefill and one of role decode; "
                "add the missing pool or set disaggregation: never"
            )
        if self.disaggregation == "never" and Role.BOTH not in roles:
            raise ValueError("disaggregation: never needs a pool of role both")
        if self.disaggregation == "auto" and not roles & {Role.BOTH, Role.DECODE}:
            raise ValueError("disaggregation: auto needs a pool of role decode or both")
        return self

    @model_validator(mode="after")
    def _kv_exchangeable(self) -> Self:
        if not self.disaggregated:
            return self
        first = self.pools[0]
        for pool in self.pools[1:]:
            for field in ("kind", "block_size", "kv_dtype", "tensor_parallel_size"):
                mine, theirs = getattr(first.engine, field), getattr(pool.engine, field)
                if mine != theirs:
                    raise ValueError(
                        f"pools {first.name} and {pool.name} cannot exchange KV: "
                        f"engine.{field} is {mine} and {theirs}; make them equal"
                    )
        return self

    @model_validator(mode="after")
    def _slo_classes_named_apart(self) -> Self:
        names = [each.name for each in self.slo]
        if len(set(names)) != len(names):
            raise ValueError(f"slo: names must differ, found {names}; rename one")
        return self

    @model_validator(mode="after")
    def _adapters_named_apart(self) -> Self:
        names = [adapter.name for adapter in self.lora]
        if len(set(names)) != len(names):
            raise ValueError(f"lora: names must differ, found {names}; rename one")
        if self.model.name in names:
            raise ValueError(
                f"lora: {self.model.name!r} is the model's served name too, so a request could not tell them "
                "apart; rename the adapter or set model.served_name"
            )
        return self

    @model_validator(mode="after")
    def _endpoints_of_known_pools(self) -> Self:
        pools = [pool.name for pool in self.pools]
        for endpoint in self.discovery.endpoints:
            if (name := endpoint.partition("=")[0]) not in pools:
                raise ValueError(
                    f"discovery: endpoint {endpoint!r} is of pool {name!r}, and the pools are "
                    f"{', '.join(pools)}; name one of them"
                )
        return self
