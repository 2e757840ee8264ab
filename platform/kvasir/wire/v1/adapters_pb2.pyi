from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HeldAdapter(_message.Message):
    __slots__ = ("name", "source", "replicas", "digest", "rank", "nbytes", "retiring")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRING_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    replicas: int
    digest: str
    rank: int
    nbytes: int
    retiring: bool
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., replicas: _Optional[int] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., nbytes: _Optional[int] = ..., retiring: _Optional[bool] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("number", "name", "source", "replicas", "digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    source: str
    replicas: int
    digest: str
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ..., source: _Optional[str] = ..., replicas: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("number", "name")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class AdaptersHeld(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[HeldAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[HeldAdapter, _Mapping]]] = ...) -> None: ...

class AdapterAnswer(_message.Message):
    __slots__ = ("number", "code", "message", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: str
    message: str
    status: int
    def __init__(self, number: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., status: _Optional[int] = ...) -> None: ...
