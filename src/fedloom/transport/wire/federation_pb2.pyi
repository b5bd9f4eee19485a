from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Quantity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTITY_UNSPECIFIED: _ClassVar[Quantity]
    QUANTITY_DESCRIPTOR: _ClassVar[Quantity]
    QUANTITY_DESCRIPTOR_UPDATE: _ClassVar[Quantity]
    QUANTITY_EMBEDDING_NETWORK: _ClassVar[Quantity]
    QUANTITY_EMBEDDING_NETWORK_UPDATE: _ClassVar[Quantity]
    QUANTITY_MODEL: _ClassVar[Quantity]
    QUANTITY_MODEL_UPDATE: _ClassVar[Quantity]
    QUANTITY_GAUSSIAN: _ClassVar[Quantity]
    QUANTITY_GRADIENT: _ClassVar[Quantity]
    QUANTITY_LOSS: _ClassVar[Quantity]
    QUANTITY_COUNT: _ClassVar[Quantity]
    QUANTITY_METRICS: _ClassVar[Quantity]
    QUANTITY_OTHER: _ClassVar[Quantity]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CODE_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_CODE_HELLO: _ClassVar[RefusalCode]
    REFUSAL_CODE_PROTOCOL: _ClassVar[RefusalCode]
    REFUSAL_CODE_PACKAGE: _ClassVar[RefusalCode]
    REFUSAL_CODE_ALGORITHM: _ClassVar[RefusalCode]
    REFUSAL_CODE_CLIENTS: _ClassVar[RefusalCode]
    REFUSAL_CODE_REPLACED: _ClassVar[RefusalCode]
    REFUSAL_CODE_CLIENT_TAKEN: _ClassVar[RefusalCode]
QUANTITY_UNSPECIFIED: Quantity
QUANTITY_DESCRIPTOR: Quantity
QUANTITY_DESCRIPTOR_UPDATE: Quantity
QUANTITY_EMBEDDING_NETWORK: Quantity
QUANTITY_EMBEDDING_NETWORK_UPDATE: Quantity
QUANTITY_MODEL: Quantity
QUANTITY_MODEL_UPDATE: Quantity
QUANTITY_GAUSSIAN: Quantity
QUANTITY_GRADIENT: Quantity
QUANTITY_LOSS: Quantity
QUANTITY_COUNT: Quantity
QUANTITY_METRICS: Quantity
QUANTITY_OTHER: Quantity
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_BOOL: DataType
REFUSAL_CODE_UNSPECIFIED: RefusalCode
REFUSAL_CODE_HELLO: RefusalCode
REFUSAL_CODE_PROTOCOL: RefusalCode
REFUSAL_CODE_PACKAGE: RefusalCode
REFUSAL_CODE_ALGORITHM: RefusalCode
REFUSAL_CODE_CLIENTS: RefusalCode
REFUSAL_CODE_REPLACED: RefusalCode
REFUSAL_CODE_CLIENT_TAKEN: RefusalCode

class TensorSpec(_message.Message):
    __slots__ = ("name", "quantity", "per_client", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUANTITY_FIELD_NUMBER: _ClassVar[int]
    PER_CLIENT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    quantity: Quantity
    per_client: bool
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., quantity: _Optional[_Union[Quantity, str]] = ..., per_client: bool = ..., dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class ConversationKey(_message.Message):
    __slots__ = ("round", "attempt", "conversation", "purpose")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    conversation: int
    purpose: str
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., conversation: _Optional[int] = ..., purpose: _Optional[str] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("run", "incarnation", "conversation", "exchange", "rows", "clients", "message", "tensors", "replay", "states", "trace")
    RUN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    run: str
    incarnation: str
    conversation: ConversationKey
    exchange: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    clients: _containers.RepeatedScalarFieldContainer[str]
    message: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    replay: bool
    states: _containers.RepeatedCompositeFieldContainer[ClientState]
    trace: str
    def __init__(self, run: _Optional[str] = ..., incarnation: _Optional[str] = ..., conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., exchange: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., clients: _Optional[_Iterable[str]] = ..., message: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., replay: bool = ..., states: _Optional[_Iterable[_Union[ClientState, _Mapping]]] = ..., trace: _Optional[str] = ...) -> None: ...

class ClientState(_message.Message):
    __slots__ = ("start", "needed", "life")
    START_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    start: StateVersion
    needed: _containers.RepeatedCompositeFieldContainer[StateVersion]
    life: int
    def __init__(self, start: _Optional[_Union[StateVersion, _Mapping]] = ..., needed: _Optional[_Iterable[_Union[StateVersion, _Mapping]]] = ..., life: _Optional[int] = ...) -> None: ...

class StateVersion(_message.Message):
    __slots__ = ("round", "attempt", "conversation", "row", "life")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    conversation: int
    row: int
    life: int
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., conversation: _Optional[int] = ..., row: _Optional[int] = ..., life: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "package", "worker", "incarnation", "clients", "device", "algorithms", "held_of", "held", "announced", "oldest_protocol", "partial")
    class AlgorithmsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHMS_FIELD_NUMBER: _ClassVar[int]
    HELD_OF_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    package: str
    worker: str
    incarnation: str
    clients: _containers.RepeatedScalarFieldContainer[str]
    device: str
    algorithms: _containers.ScalarMap[str, int]
    held_of: str
    held: _containers.RepeatedCompositeFieldContainer[Held]
    announced: _containers.RepeatedCompositeFieldContainer[Announced]
    oldest_protocol: int
    partial: _containers.RepeatedCompositeFieldContainer[Partial]
    def __init__(self, protocol: _Optional[int] = ..., package: _Optional[str] = ..., worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., clients: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., algorithms: _Optional[_Mapping[str, int]] = ..., held_of: _Optional[str] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., announced: _Optional[_Iterable[_Union[Announced, _Mapping]]] = ..., oldest_protocol: _Optional[int] = ..., partial: _Optional[_Iterable[_Union[Partial, _Mapping]]] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("train", "validation", "test", "labelled", "observer", "class_counts")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    TEST_FIELD_NUMBER: _ClassVar[int]
    LABELLED_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    CLASS_COUNTS_FIELD_NUMBER: _ClassVar[int]
    train: int
    validation: int
    test: int
    labelled: bool
    observer: bool
    class_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, train: _Optional[int] = ..., validation: _Optional[int] = ..., test: _Optional[int] = ..., labelled: bool = ..., observer: bool = ..., class_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("conversation", "exchange", "rows")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    exchange: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., exchange: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class Partial(_message.Message):
    __slots__ = ("conversation", "exchange", "rows", "message", "tensors", "received", "crc32")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    exchange: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    message: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    received: int
    crc32: int
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., exchange: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., message: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., received: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "incarnation", "experiment", "protocol")
    RUN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    run: str
    incarnation: str
    experiment: str
    protocol: int
    def __init__(self, run: _Optional[str] = ..., incarnation: _Optional[str] = ..., experiment: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "reason", "protocol", "oldest_protocol", "algorithm", "algorithm_version")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_VERSION_FIELD_NUMBER: _ClassVar[int]
    code: RefusalCode
    reason: str
    protocol: int
    oldest_protocol: int
    algorithm: str
    algorithm_version: int
    def __init__(self, code: _Optional[_Union[RefusalCode, str]] = ..., reason: _Optional[str] = ..., protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., algorithm: _Optional[str] = ..., algorithm_version: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("transfer", "envelope", "total_bytes", "remaining_s", "offset")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    envelope: Envelope
    total_bytes: int
    remaining_s: float
    offset: int
    def __init__(self, transfer: _Optional[int] = ..., envelope: _Optional[_Union[Envelope, _Mapping]] = ..., total_bytes: _Optional[int] = ..., remaining_s: _Optional[float] = ..., offset: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("transfer", "offset", "data")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    offset: int
    data: bytes
    def __init__(self, transfer: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class CloseConversation(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("conversation", "exchange", "rows")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    exchange: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., exchange: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class Again(_message.Message):
    __slots__ = ("conversation", "exchange", "rows", "partial")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    exchange: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    partial: _containers.RepeatedCompositeFieldContainer[Partial]
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., exchange: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., partial: _Optional[_Iterable[_Union[Partial, _Mapping]]] = ...) -> None: ...

class RowLost(_message.Message):
    __slots__ = ("conversation", "exchange", "row", "reason", "bug")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BUG_FIELD_NUMBER: _ClassVar[int]
    conversation: ConversationKey
    exchange: int
    row: int
    reason: str
    bug: bool
    def __init__(self, conversation: _Optional[_Union[ConversationKey, _Mapping]] = ..., exchange: _Optional[int] = ..., row: _Optional[int] = ..., reason: _Optional[str] = ..., bug: bool = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Withheld(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class TransferRefused(_message.Message):
    __slots__ = ("transfer", "reason")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    reason: str
    def __init__(self, transfer: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Standing(_message.Message):
    __slots__ = ("standing",)
    STANDING_FIELD_NUMBER: _ClassVar[int]
    standing: str
    def __init__(self, standing: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("parts", "crc32")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[WorkerPart]
    crc32: int
    def __init__(self, parts: _Optional[_Iterable[_Union[WorkerPart, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class WorkerPart(_message.Message):
    __slots__ = ("hello", "begin", "chunk", "end", "missing", "row_lost", "heartbeat", "declined", "withheld")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ROW_LOST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    begin: Begin
    chunk: Chunk
    end: End
    missing: Missing
    row_lost: RowLost
    heartbeat: Heartbeat
    declined: Declined
    withheld: Withheld
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., missing: _Optional[_Union[Missing, _Mapping]] = ..., row_lost: _Optional[_Union[RowLost, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., withheld: _Optional[_Union[Withheld, _Mapping]] = ...) -> None: ...

class AggregatorFrame(_message.Message):
    __slots__ = ("parts", "crc32")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[AggregatorPart]
    crc32: int
    def __init__(self, parts: _Optional[_Iterable[_Union[AggregatorPart, _Mapping]]] = ..., crc32: _Optional[int] = ...) -> None: ...

class AggregatorPart(_message.Message):
    __slots__ = ("welcome", "refused", "begin", "chunk", "end", "close", "transfer_refused", "goodbye", "again", "heartbeat", "standing")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_REFUSED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    begin: Begin
    chunk: Chunk
    end: End
    close: CloseConversation
    transfer_refused: TransferRefused
    goodbye: Goodbye
    again: Again
    heartbeat: Heartbeat
    standing: Standing
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., close: _Optional[_Union[CloseConversation, _Mapping]] = ..., transfer_refused: _Optional[_Union[TransferRefused, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., again: _Optional[_Union[Again, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...
