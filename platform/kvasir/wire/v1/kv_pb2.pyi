from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class KvBatch(_message.Message):
    __slots__ = ("epoch", "sequence", "log")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    log: bytes
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., log: _Optional[bytes] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "log", "last")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    log: bytes
    last: bool
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., log: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...
