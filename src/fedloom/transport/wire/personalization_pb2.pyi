from fedloom.transport.wire import federation_pb2 as _federation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServedRound(_message.Message):
    __slots__ = ("run", "round", "digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    digest: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol", "oldest_protocol")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    oldest_protocol: int
    def __init__(self, protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class Described(_message.Message):
    __slots__ = ("served", "package", "algorithm", "algorithm_version", "experiment", "problem", "load", "protocol")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    served: ServedRound
    package: str
    algorithm: str
    algorithm_version: int
    experiment: str
    problem: str
    load: ServerLoad
    protocol: int
    def __init__(self, served: _Optional[_Union[ServedRound, _Mapping]] = ..., package: _Optional[str] = ..., algorithm: _Optional[str] = ..., algorithm_version: _Optional[int] = ..., experiment: _Optional[str] = ..., problem: _Optional[str] = ..., load: _Optional[_Union[ServerLoad, _Mapping]] = ..., protocol: _Optional[int] = ...) -> None: ...

class ServerLoad(_message.Message):
    __slots__ = ("handed_out", "refused", "waiting", "p50_ms", "p90_ms", "p99_ms")
    HANDED_OUT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P90_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    handed_out: int
    refused: int
    waiting: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    def __init__(self, handed_out: _Optional[int] = ..., refused: _Optional[int] = ..., waiting: _Optional[int] = ..., p50_ms: _Optional[float] = ..., p90_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("client", "package", "algorithm", "algorithm_version", "round")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    client: str
    package: str
    algorithm: str
    algorithm_version: int
    round: int
    def __init__(self, client: _Optional[str] = ..., package: _Optional[str] = ..., algorithm: _Optional[str] = ..., algorithm_version: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("served", "last")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    served: ServedRound
    last: bool
    def __init__(self, served: _Optional[_Union[ServedRound, _Mapping]] = ..., last: bool = ...) -> None: ...

class NewcomerFrame(_message.Message):
    __slots__ = ("parts", "crc32")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[NewcomerPart]
    crc32: int
    def __init__(self, parts: _Optional[_Iterable[_Union[NewcomerPart, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class NewcomerPart(_message.Message):
    __slots__ = ("ask", "begin", "chunk", "end")
    ASK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ask: Ask
    begin: _federation_pb2.Begin
    chunk: _federation_pb2.Chunk
    end: _federation_pb2.End
    def __init__(self, ask: _Optional[_Union[Ask, _Mapping]] = ..., begin: _Optional[_Union[_federation_pb2.Begin, _Mapping]] = ..., chunk: _Optional[_Union[_federation_pb2.Chunk, _Mapping]] = ..., end: _Optional[_Union[_federation_pb2.End, _Mapping]] = ...) -> None: ...

class ModelFrame(_message.Message):
    __slots__ = ("parts", "crc32")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[ModelPart]
    crc32: int
    def __init__(self, parts: _Optional[_Iterable[_Union[ModelPart, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class ModelPart(_message.Message):
    __slots__ = ("header", "begin", "chunk", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: Header
    begin: _federation_pb2.Begin
    chunk: _federation_pb2.Chunk
    end: _federation_pb2.End
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., begin: _Optional[_Union[_federation_pb2.Begin, _Mapping]] = ..., chunk: _Optional[_Union[_federation_pb2.Chunk, _Mapping]] = ..., end: _Optional[_Union[_federation_pb2.End, _Mapping]] = ...) -> None: ...
