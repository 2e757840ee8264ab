from kvasir.wire.v1 import adapters_pb2 as _adapters_pb2
from kvasir.wire.v1 import identity_pb2 as _identity_pb2
from kvasir.wire.v1 import kv_pb2 as _kv_pb2
from kvasir.wire.v1 import requests_pb2 as _requests_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "frame")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    frame: RouterFrame
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., frame: _Optional[_Union[RouterFrame, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "frame")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frame: WorkerFrame
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frame: _Optional[_Union[WorkerFrame, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "session_id", "received_seq", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SEQ_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    session_id: str
    received_seq: int
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., session_id: _Optional[str] = ..., received_seq: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "resumed", "received_seq", "identity")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SEQ_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    resumed: bool
    received_seq: int
    identity: _identity_pb2.WorkerIdentity
    def __init__(self, session_id: _Optional[str] = ..., resumed: _Optional[bool] = ..., received_seq: _Optional[int] = ..., identity: _Optional[_Union[_identity_pb2.WorkerIdentity, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[_requests_pb2.EngineRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[_requests_pb2.EngineRequest, _Mapping]]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeases(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason", "grace_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    grace_s: float
    def __init__(self, reason: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDraining(_message.Message):
    __slots__ = ("draining", "reason", "grace_s")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    reason: str
    grace_s: float
    def __init__(self, draining: _Optional[bool] = ..., reason: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("seq", "ack", "submit", "abort", "release_leases", "goodbye", "set_draining", "load_adapter", "unload_adapter")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LEASES_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    SET_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ack: int
    submit: Submit
    abort: Abort
    release_leases: ReleaseLeases
    goodbye: Goodbye
    set_draining: SetDraining
    load_adapter: _adapters_pb2.LoadAdapter
    unload_adapter: _adapters_pb2.UnloadAdapter
    def __init__(self, seq: _Optional[int] = ..., ack: _Optional[int] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., release_leases: _Optional[_Union[ReleaseLeases, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., set_draining: _Optional[_Union[SetDraining, _Mapping]] = ..., load_adapter: _Optional[_Union[_adapters_pb2.LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[_adapters_pb2.UnloadAdapter, _Mapping]] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("seq", "ack", "step_batch", "draining", "serving", "adapters_held", "adapter_answer")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    STEP_BATCH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_HELD_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ack: int
    step_batch: _requests_pb2.StepBatch
    draining: Draining
    serving: Serving
    adapters_held: _adapters_pb2.AdaptersHeld
    adapter_answer: _adapters_pb2.AdapterAnswer
    def __init__(self, seq: _Optional[int] = ..., ack: _Optional[int] = ..., step_batch: _Optional[_Union[_requests_pb2.StepBatch, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., serving: _Optional[_Union[Serving, _Mapping]] = ..., adapters_held: _Optional[_Union[_adapters_pb2.AdaptersHeld, _Mapping]] = ..., adapter_answer: _Optional[_Union[_adapters_pb2.AdapterAnswer, _Mapping]] = ...) -> None: ...
