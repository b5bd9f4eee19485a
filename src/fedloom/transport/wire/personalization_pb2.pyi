from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_UNSPECIFIED: _ClassVar[Precision]
    PRECISION_FLOAT32: _ClassVar[Precision]
    PRECISION_BFLOAT16: _ClassVar[Precision]

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT64: _ClassVar[ElementType]
    ELEMENT_TYPE_INT64: _ClassVar[ElementType]
    ELEMENT_TYPE_UINT8: _ClassVar[ElementType]
    ELEMENT_TYPE_BOOL: _ClassVar[ElementType]
    ELEMENT_TYPE_BFLOAT16: _ClassVar[ElementType]
PRECISION_UNSPECIFIED: Precision
PRECISION_FLOAT32: Precision
PRECISION_BFLOAT16: Precision
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_FLOAT64: ElementType
ELEMENT_TYPE_INT64: ElementType
ELEMENT_TYPE_UINT8: ElementType
ELEMENT_TYPE_BOOL: ElementType
ELEMENT_TYPE_BFLOAT16: ElementType

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
    __slots__ = ()
    def __init__(self) -> None: ...

class Described(_message.Message):
    __slots__ = ("served", "package", "algorithm", "algorithm_version", "experiment", "problem", "load")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    served: ServedRound
    package: str
    algorithm: str
    algorithm_version: int
    experiment: str
    problem: str
    load: ServerLoad
    def __init__(self, served: _Optional[_Union[ServedRound, _Mapping]] = ..., package: _Optional[str] = ..., algorithm: _Optional[str] = ..., algorithm_version: _Optional[int] = ..., experiment: _Optional[str] = ..., problem: _Optional[str] = ..., load: _Optional[_Union[ServerLoad, _Mapping]] = ...) -> None: ...

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

class NewcomerFrame(_message.Message):
    __slots__ = ("ask", "spoken", "data")
    ASK_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ask: Ask
    spoken: Spoken
    data: bytes
    def __init__(self, ask: _Optional[_Union[Ask, _Mapping]] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("client", "package", "algorithm", "algorithm_version", "precision", "round", "held", "answers")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_VERSION_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    client: str
    package: str
    algorithm: str
    algorithm_version: int
    precision: Precision
    round: int
    held: _containers.RepeatedScalarFieldContainer[str]
    answers: str
    def __init__(self, client: _Optional[str] = ..., package: _Optional[str] = ..., algorithm: _Optional[str] = ..., algorithm_version: _Optional[int] = ..., precision: _Optional[_Union[Precision, str]] = ..., round: _Optional[int] = ..., held: _Optional[_Iterable[str]] = ..., answers: _Optional[str] = ...) -> None: ...

class Spoken(_message.Message):
    __slots__ = ("message", "tensors", "crc32")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    message: str
    tensors: _containers.RepeatedCompositeFieldContainer[SpokenTensor]
    crc32: int
    def __init__(self, message: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[SpokenTensor, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class SpokenTensor(_message.Message):
    __slots__ = ("name", "type", "shape", "digest", "held")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: ElementType
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    held: bool
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[ElementType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., held: bool = ...) -> None: ...

class ModelFrame(_message.Message):
    __slots__ = ("served", "precision", "spoken", "last", "data")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    served: ServedRound
    precision: Precision
    spoken: Spoken
    last: bool
    data: bytes
    def __init__(self, served: _Optional[_Union[ServedRound, _Mapping]] = ..., precision: _Optional[_Union[Precision, str]] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ..., last: bool = ..., data: _Optional[bytes] = ...) -> None: ...
