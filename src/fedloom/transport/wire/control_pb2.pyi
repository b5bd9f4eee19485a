from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_WAITING: _ClassVar[Phase]
    PHASE_TRAINING: _ClassVar[Phase]
    PHASE_EVALUATING: _ClassVar[Phase]
    PHASE_SAVING: _ClassVar[Phase]
    PHASE_PAUSED: _ClassVar[Phase]
    PHASE_STOPPING: _ClassVar[Phase]
    PHASE_FINISHED: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_WAITING: Phase
PHASE_TRAINING: Phase
PHASE_EVALUATING: Phase
PHASE_SAVING: Phase
PHASE_PAUSED: Phase
PHASE_STOPPING: Phase
PHASE_FINISHED: Phase
PHASE_FAILED: Phase

class Activity(_message.Message):
    __slots__ = ("run", "method", "incarnation", "time", "started", "phase", "since", "message", "round", "rounds", "doing", "attempt", "durable_round", "durable_at", "paused_by", "clients", "awaited", "late", "awaiting", "rounds_per_s", "client_steps_per_s", "measured", "train_loss", "totals", "workers", "privacy")
    RUN_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_ROUND_FIELD_NUMBER: _ClassVar[int]
    DURABLE_AT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    AWAITING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CLIENT_STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    run: str
    method: str
    incarnation: str
    time: float
    started: float
    phase: Phase
    since: float
    message: str
    round: int
    rounds: int
    doing: int
    attempt: int
    durable_round: int
    durable_at: float
    paused_by: str
    clients: ClientCounts
    awaited: int
    late: int
    awaiting: _containers.RepeatedCompositeFieldContainer[Awaited]
    rounds_per_s: float
    client_steps_per_s: float
    measured: Measured
    train_loss: float
    totals: Totals
    workers: _containers.RepeatedCompositeFieldContainer[ConnectedWorker]
    privacy: PrivacySpent
    def __init__(self, run: _Optional[str] = ..., method: _Optional[str] = ..., incarnation: _Optional[str] = ..., time: _Optional[float] = ..., started: _Optional[float] = ..., phase: _Optional[_Union[Phase, str]] = ..., since: _Optional[float] = ..., message: _Optional[str] = ..., round: _Optional[int] = ..., rounds: _Optional[int] = ..., doing: _Optional[int] = ..., attempt: _Optional[int] = ..., durable_round: _Optional[int] = ..., durable_at: _Optional[float] = ..., paused_by: _Optional[str] = ..., clients: _Optional[_Union[ClientCounts, _Mapping]] = ..., awaited: _Optional[int] = ..., late: _Optional[int] = ..., awaiting: _Optional[_Iterable[_Union[Awaited, _Mapping]]] = ..., rounds_per_s: _Optional[float] = ..., client_steps_per_s: _Optional[float] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., train_loss: _Optional[float] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[ConnectedWorker, _Mapping]]] = ..., privacy: _Optional[_Union[PrivacySpent, _Mapping]] = ...) -> None: ...

class PrivacySpent(_message.Message):
    __slots__ = ("epsilon", "delta", "sums", "budget", "epsilon_members", "epsilon_aggregator")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    EPSILON_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPSILON_AGGREGATOR_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    delta: float
    sums: int
    budget: float
    epsilon_members: float
    epsilon_aggregator: float
    def __init__(self, epsilon: _Optional[float] = ..., delta: _Optional[float] = ..., sums: _Optional[int] = ..., budget: _Optional[float] = ..., epsilon_members: _Optional[float] = ..., epsilon_aggregator: _Optional[float] = ...) -> None: ...

class ClientCounts(_message.Message):
    __slots__ = ("roster", "observing", "connected", "absent", "cohort", "answered")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    OBSERVING_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    roster: int
    observing: int
    connected: int
    absent: int
    cohort: int
    answered: int
    def __init__(self, roster: _Optional[int] = ..., observing: _Optional[int] = ..., connected: _Optional[int] = ..., absent: _Optional[int] = ..., cohort: _Optional[int] = ..., answered: _Optional[int] = ...) -> None: ...

class Awaited(_message.Message):
    __slots__ = ("client", "worker", "since", "deadline", "late")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    client: str
    worker: str
    since: float
    deadline: float
    late: bool
    def __init__(self, client: _Optional[str] = ..., worker: _Optional[str] = ..., since: _Optional[float] = ..., deadline: _Optional[float] = ..., late: bool = ...) -> None: ...

class ConnectedWorker(_message.Message):
    __slots__ = ("name", "identity", "device", "clients", "since", "sign")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SIGN_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: str
    device: str
    clients: int
    since: float
    sign: float
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[str] = ..., device: _Optional[str] = ..., clients: _Optional[int] = ..., since: _Optional[float] = ..., sign: _Optional[float] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("clients", "accuracy_mean", "accuracy_worst_decile", "accuracy_pooled", "loss_mean", "mean", "worst_decile", "pooled")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_MEAN_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_WORST_DECILE_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_POOLED_FIELD_NUMBER: _ClassVar[int]
    LOSS_MEAN_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    WORST_DECILE_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    clients: int
    accuracy_mean: float
    accuracy_worst_decile: float
    accuracy_pooled: float
    loss_mean: float
    mean: float
    worst_decile: float
    pooled: float
    def __init__(self, clients: _Optional[int] = ..., accuracy_mean: _Optional[float] = ..., accuracy_worst_decile: _Optional[float] = ..., accuracy_pooled: _Optional[float] = ..., loss_mean: _Optional[float] = ..., mean: _Optional[float] = ..., worst_decile: _Optional[float] = ..., pooled: _Optional[float] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("round", "groups", "validation_pooled", "validation_loss", "train_loss", "metric", "higher_is_better", "percent")
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Group
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Group, _Mapping]] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_POOLED_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    HIGHER_IS_BETTER_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    groups: _containers.MessageMap[str, Group]
    validation_pooled: float
    validation_loss: float
    train_loss: float
    metric: str
    higher_is_better: bool
    percent: bool
    def __init__(self, round: _Optional[int] = ..., groups: _Optional[_Mapping[str, Group]] = ..., validation_pooled: _Optional[float] = ..., validation_loss: _Optional[float] = ..., train_loss: _Optional[float] = ..., metric: _Optional[str] = ..., higher_is_better: bool = ..., percent: bool = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("rounds", "failed_attempts", "client_steps", "seconds", "bytes_up", "bytes_down", "exchanges", "phases", "refusals")
    class ExchangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    failed_attempts: int
    client_steps: float
    seconds: float
    bytes_up: int
    bytes_down: int
    exchanges: _containers.ScalarMap[str, float]
    phases: _containers.ScalarMap[str, float]
    refusals: _containers.ScalarMap[str, int]
    def __init__(self, rounds: _Optional[int] = ..., failed_attempts: _Optional[int] = ..., client_steps: _Optional[float] = ..., seconds: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., exchanges: _Optional[_Mapping[str, float]] = ..., phases: _Optional[_Mapping[str, float]] = ..., refusals: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RosterClient(_message.Message):
    __slots__ = ("id", "observes", "connected", "worker", "identity", "examples", "last_round", "awaited_since")
    ID_FIELD_NUMBER: _ClassVar[int]
    OBSERVES_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    AWAITED_SINCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    observes: bool
    connected: bool
    worker: str
    identity: str
    examples: int
    last_round: int
    awaited_since: float
    def __init__(self, id: _Optional[str] = ..., observes: bool = ..., connected: bool = ..., worker: _Optional[str] = ..., identity: _Optional[str] = ..., examples: _Optional[int] = ..., last_round: _Optional[int] = ..., awaited_since: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("activity",)
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    activity: Activity
    def __init__(self, activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("activity",)
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    activity: Activity
    def __init__(self, activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class ClientsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClientsResponse(_message.Message):
    __slots__ = ("clients",)
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[RosterClient]
    def __init__(self, clients: _Optional[_Iterable[_Union[RosterClient, _Mapping]]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("changed", "activity")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    activity: Activity
    def __init__(self, changed: bool = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("changed", "activity")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    activity: Activity
    def __init__(self, changed: bool = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("now",)
    NOW_FIELD_NUMBER: _ClassVar[int]
    now: bool
    def __init__(self, now: bool = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("activity",)
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    activity: Activity
    def __init__(self, activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...
