from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
    ROLE_EMBED: _ClassVar[Role]

class NicProtocol(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NIC_PROTOCOL_UNSPECIFIED: _ClassVar[NicProtocol]
    NIC_PROTOCOL_RDMA: _ClassVar[NicProtocol]
    NIC_PROTOCOL_ETHERNET: _ClassVar[NicProtocol]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role
ROLE_EMBED: Role
NIC_PROTOCOL_UNSPECIFIED: NicProtocol
NIC_PROTOCOL_RDMA: NicProtocol
NIC_PROTOCOL_ETHERNET: NicProtocol

class KvLayout(_message.Message):
    __slots__ = ("block_size", "dtype", "layout", "layers", "kv_heads", "head_size", "bytes_per_block", "tensor_parallel_size")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_size: int
    bytes_per_block: int
    tensor_parallel_size: int
    def __init__(self, block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class GoldenPrompt(_message.Message):
    __slots__ = ("name", "text", "tokens", "chain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    tokens: int
    chain: int
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[int] = ..., chain: _Optional[int] = ...) -> None: ...

class Hardware(_message.Message):
    __slots__ = ("device", "devices", "flops", "bytes_per_s")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    device: str
    devices: int
    flops: float
    bytes_per_s: float
    def __init__(self, device: _Optional[str] = ..., devices: _Optional[int] = ..., flops: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Nic(_message.Message):
    __slots__ = ("name", "protocol", "bits_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    protocol: NicProtocol
    bits_per_s: int
    def __init__(self, name: _Optional[str] = ..., protocol: _Optional[_Union[NicProtocol, str]] = ..., bits_per_s: _Optional[int] = ...) -> None: ...

class Locality(_message.Message):
    __slots__ = ("node", "zone", "rack", "nvlink_domain", "nics")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    NVLINK_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    NICS_FIELD_NUMBER: _ClassVar[int]
    node: str
    zone: str
    rack: str
    nvlink_domain: str
    nics: _containers.RepeatedCompositeFieldContainer[Nic]
    def __init__(self, node: _Optional[str] = ..., zone: _Optional[str] = ..., rack: _Optional[str] = ..., nvlink_domain: _Optional[str] = ..., nics: _Optional[_Iterable[_Union[Nic, _Mapping]]] = ...) -> None: ...

class AttentionWork(_message.Message):
    __slots__ = ("layers", "flops", "elements", "window", "prompt_flops", "expanded_flops", "kv_heads")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FLOPS_FIELD_NUMBER: _ClassVar[int]
    EXPANDED_FLOPS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    flops: float
    elements: float
    window: int
    prompt_flops: float
    expanded_flops: float
    kv_heads: int
    def __init__(self, layers: _Optional[int] = ..., flops: _Optional[float] = ..., elements: _Optional[float] = ..., window: _Optional[int] = ..., prompt_flops: _Optional[float] = ..., expanded_flops: _Optional[float] = ..., kv_heads: _Optional[int] = ...) -> None: ...

class ModelWork(_message.Message):
    __slots__ = ("layers", "hidden", "dense", "head", "embedding", "attention", "expert", "experts", "experts_per_token", "expert_layers", "state_bytes", "state_flops")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FLOPS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    hidden: int
    dense: float
    head: float
    embedding: float
    attention: _containers.RepeatedCompositeFieldContainer[AttentionWork]
    expert: float
    experts: int
    experts_per_token: int
    expert_layers: int
    state_bytes: float
    state_flops: float
    def __init__(self, layers: _Optional[int] = ..., hidden: _Optional[int] = ..., dense: _Optional[float] = ..., head: _Optional[float] = ..., embedding: _Optional[float] = ..., attention: _Optional[_Iterable[_Union[AttentionWork, _Mapping]]] = ..., expert: _Optional[float] = ..., experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., expert_layers: _Optional[int] = ..., state_bytes: _Optional[float] = ..., state_flops: _Optional[float] = ...) -> None: ...

class WorkerIdentity(_message.Message):
    __slots__ = ("worker_id", "epoch", "pool", "role", "model", "revision", "tokenizer_digest", "max_model_len", "kv", "kv_blocks", "engine", "engine_version", "transfer", "adapters", "data_parallel_size", "protocol_version", "hash_version", "reports_kv", "golden", "hardware", "model_parameters", "model_bytes", "shared_tier", "locality", "work", "any_role", "images", "media")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_KV_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    MODEL_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_TIER_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    ANY_ROLE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    pool: str
    role: Role
    model: str
    revision: str
    tokenizer_digest: str
    max_model_len: int
    kv: KvLayout
    kv_blocks: int
    engine: str
    engine_version: str
    transfer: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    data_parallel_size: int
    protocol_version: int
    hash_version: int
    reports_kv: bool
    golden: _containers.RepeatedCompositeFieldContainer[GoldenPrompt]
    hardware: Hardware
    model_parameters: int
    model_bytes: int
    shared_tier: str
    locality: Locality
    work: ModelWork
    any_role: bool
    images: bool
    media: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., pool: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., kv: _Optional[_Union[KvLayout, _Mapping]] = ..., kv_blocks: _Optional[int] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., transfer: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., data_parallel_size: _Optional[int] = ..., protocol_version: _Optional[int] = ..., hash_version: _Optional[int] = ..., reports_kv: _Optional[bool] = ..., golden: _Optional[_Iterable[_Union[GoldenPrompt, _Mapping]]] = ..., hardware: _Optional[_Union[Hardware, _Mapping]] = ..., model_parameters: _Optional[int] = ..., model_bytes: _Optional[int] = ..., shared_tier: _Optional[str] = ..., locality: _Optional[_Union[Locality, _Mapping]] = ..., work: _Optional[_Union[ModelWork, _Mapping]] = ..., any_role: _Optional[bool] = ..., images: _Optional[bool] = ..., media: _Optional[_Iterable[str]] = ...) -> None: ...
