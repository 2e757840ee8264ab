from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvMedium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_MEDIUM_UNSPECIFIED: _ClassVar[KvMedium]
    KV_MEDIUM_DEVICE: _ClassVar[KvMedium]
    KV_MEDIUM_CPU: _ClassVar[KvMedium]
    KV_MEDIUM_DISK: _ClassVar[KvMedium]
    KV_MEDIUM_REMOTE: _ClassVar[KvMedium]
KV_MEDIUM_UNSPECIFIED: KvMedium
KV_MEDIUM_DEVICE: KvMedium
KV_MEDIUM_CPU: KvMedium
KV_MEDIUM_DISK: KvMedium
KV_MEDIUM_REMOTE: KvMedium

class KvStored(_message.Message):
    __slots__ = ("parent_hash", "block_hashes")
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    parent_hash: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parent_hash: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class KvRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class KvCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvDelta(_message.Message):
    __slots__ = ("epoch", "sequence", "data_parallel_rank", "medium", "stored", "removed", "cleared")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    data_parallel_rank: int
    medium: KvMedium
    stored: KvStored
    removed: KvRemoved
    cleared: KvCleared
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., medium: _Optional[_Union[KvMedium, str]] = ..., stored: _Optional[_Union[KvStored, _Mapping]] = ..., removed: _Optional[_Union[KvRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCleared, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "part", "parts_total", "data_parallel_rank", "medium", "stored")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    part: int
    parts_total: int
    data_parallel_rank: int
    medium: KvMedium
    stored: _containers.RepeatedCompositeFieldContainer[KvStored]
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., part: _Optional[int] = ..., parts_total: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., medium: _Optional[_Union[KvMedium, str]] = ..., stored: _Optional[_Iterable[_Union[KvStored, _Mapping]]] = ...) -> None: ...
