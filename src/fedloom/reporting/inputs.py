"""Schemas of a run's files for reports, which distinguish a damaged file from a bug in the report."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedloom.errors import DataError
from fedloom.reporting.privacy_files import AuditFile, ClaimFile, Count, FileObject, Number
from fedloom.runs.files import AUDIT
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import ACCURACY, MODEL_LOSS

Matrix = list[list[Count]]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]
Triple = Annotated[list[Number], Field(min_length=3, max_length=3)]


OF_BROKEN_FILES = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
"""Exceptions that malformed files may cause. Bugs cause them too; the files then pass the check."""


class _Headline(FileObject):
    name: str
    higher_is_better: bool
    percent: bool


class _Values(FileObject):
    mean: Number | None
    std: Number | None
    worst: Number | None
    worst_decile: Number | None
    pooled: Number | None


class _Reading(FileObject):
    clients: Count
    metrics: dict[str, _Values | None] | None = None
    accuracy_mean: Number | None
    accuracy_std: Number | None = None
    accuracy_worst: Number | None = None
    accuracy_worst_decile: Number | None = None
    accuracy_pooled: Number | None = None
    loss_mean: Number

    @model_validator(mode="after")
    def _whole(self) -> _Reading:
        if self.accuracy_mean is not None and None in (self.accuracy_std, self.accuracy_pooled):
            raise ValueError("an accuracy is missing")
        return self


class _Group(_Reading):
    masked: _Reading | None = None
    unmasked: _Reading | None = None

    @property
    def other(self) -> frozenset[str]:
        """Secondary reading nested in the group."""
        return frozenset(self.model_fields_set & {"masked", "unmasked"})


class _Global(_Group):
    seen: _Group | None
    unseen: _Group | None


class _Groups(FileObject):
    seen: _Group | None
    unseen: _Group | None
    all: _Global | None = Field(alias="global")
    headline: _Headline | None = None

    @property
    def _known(self) -> list[_Group]:
        inner = () if self.all is None else (self.all, self.all.seen, self.all.unseen)
        return [group for group in (self.seen, self.unseen, *inner) if group is not None]

    @model_validator(mode="after")
    def _one_reading(self) -> _Groups:
        groups = self._known
        others = {group.other for group in groups}
        if groups and others not in ({frozenset({"masked"})}, {frozenset({"unmasked"})}, {frozenset()}):
            raise ValueError("all groups must have the same other reading, masked or unmasked, or none must have one")
        readings = [each for group in groups for each in (group, group.masked, group.unmasked)]
        if len({each.accuracy_mean is None for each in readings if each is not None}) > 1:
            raise ValueError("either all groups have accuracies, or none has")
        return self

    @model_validator(mode="after")
    def _measured(self) -> _Groups:
        name = ACCURACY.name if self.headline is None else self.headline.name
        for group in self._known:
            if name not in (ACCURACY.name, MODEL_LOSS.name, *(group.metrics or ())):
                raise ValueError(f"metrics must have the headline metric, {name}")
        return self


class _Round(_Groups):
    round: Count


class _Traffic(FileObject):
    payload_up: Count
    payload_down: Count
    wire_up: Count | None
    wire_down: Count | None


class _Uncertain(FileObject):
    ece: Number
    entropy: Number
    mutual_information: Number


class _Spread(FileObject):
    clients: Count
    distance: Number
    relative: Number | None


class _LeftOut(FileObject):
    absent: Count = 0
    untested: Count = 0


class _Evaluation(_Round):
    communication: _Traffic
    uncertainty: dict[str, _Uncertain | None] = Field(default_factory=dict)
    spread: dict[str, _Spread | None] = Field(default_factory=dict)
    left_out: _LeftOut = _LeftOut()
    client_steps: Count | None = None


class _Compared(_Evaluation):
    """Line of ``metrics.jsonl`` as a comparison needs it."""

    client_steps: Count
    validation_pooled: Number | None
    validation_loss: Number | None


class _OwnSteps(FileObject):
    steps: Count
    unseen: _Group | None


class _Over(FileObject):
    mean: Number
    lowest: Number
    highest: Number


class _Late(FileObject):
    evaluations: Count
    rounds: Annotated[list[Count], Field(min_length=2, max_length=2)]
    seen: dict[str, _Over] | None
    unseen: dict[str, _Over] | None
    all: dict[str, _Over] | None = Field(alias="global")


class _Calibrated(FileObject):
    ece_clients: Number | None = None


class _NewClient(FileObject):
    client_steps: Number
    payload_up: Number | None
    payload_down: Number | None


class _Summary(_Groups):
    name: str
    algorithm: str
    task: str | None = None
    titles: dict[str, str] | None = None
    dataset: str
    model: str
    seed: int
    rounds: Count
    clients_per_round: Count | None
    best: _Round | None
    own_steps: list[_OwnSteps] | None = None
    last_evaluations: _Late | None = None
    uncertainty: dict[str, _Calibrated | None] = Field(default_factory=dict)
    communication: _Traffic
    duration_s: Number
    client_steps_per_s: Number | None
    training_privacy: ClaimFile | None = None
    ended_by: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_method(cls, value: Any) -> Any:
        method = value.get("algorithm") if isinstance(value, dict) else None
        own = value.get(method, {}) if isinstance(method, str) else {}
        costs = own.get("new_client", {}) if isinstance(own, dict) else None
        if not isinstance(costs, dict):
            raise ValueError("the method's entry, and its new_client, must be objects")  # noqa: TRY004
        for cost in costs.values():
            if cost is not None:
                _NewClient.model_validate(cost)
        return value


class _Pause(FileObject):
    seconds: Number = 0.0


class _Attempt(FileObject):
    round: Count | None = None
    outcome: str = "done"
    seconds: Number = 0.0
    phases: dict[str, Number] | None = None
    paused: _Pause = _Pause()

    @model_validator(mode="after")
    def _whole(self) -> _Attempt:
        needed = {"round"} if "phases" in self.model_fields_set else set()
        needed |= set() if self.outcome in ("done", "burnt", "evaluated", "budget spent") else {"seconds"}
        if needed - self.model_fields_set or (self.phases is None and "phases" in self.model_fields_set):
            raise ValueError("an attempt must have its round, its seconds and its phases")
        return self


class _Confusion(FileObject):
    round: Count
    classes: list[str]
    personal: dict[str, Matrix | None]
    all: dict[str, Matrix | None] | None = Field(alias="global")

    @model_validator(mode="after")
    def _square(self) -> _Confusion:
        if not {"seen", "unseen"} <= self.personal.keys():
            raise ValueError("personal must have seen and unseen")
        for matrix in (*self.personal.values(), *(self.all or {}).values()):
            if matrix is not None and {len(matrix), *map(len, matrix)} != {len(self.classes)}:
                raise ValueError("a matrix must have a row and a column for each class")
        return self


class _Calibration(FileObject):
    edges: Annotated[list[Number], Field(min_length=2)]
    personal: dict[str, list[Triple] | None] | None
    all: dict[str, list[Triple] | None] | None = Field(alias="global")

    @model_validator(mode="after")
    def _bins(self) -> _Calibration:
        for rows in (*(self.personal or {}).values(), *(self.all or {}).values()):
            if rows and len(rows) != len(self.edges) - 1:
                raise ValueError("there must be a row for each bin")
        return self


class _Clients(FileObject):
    ids: list[str]
    seen: list[bool]


class _Measured(FileObject):
    round: Count
    examples: list[list[Count] | None]
    right: list[list[Count] | None]
    entropy: list[Number | None]
    mutual_information: list[Number | None]


class _Uncertainty(FileObject):
    edges: Annotated[list[Number], Field(min_length=2)]
    clients: _Clients
    rounds: Annotated[list[_Measured], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_clients(self) -> _Uncertainty:
        n = len(self.clients.ids)
        for one in self.rounds:
            columns: tuple[list[Any], ...] = (one.examples, one.right, one.entropy, one.mutual_information)
            if {len(self.clients.seen), *map(len, columns)} != {n}:
                raise ValueError("there must be one entry for each client")
            for examples, *others in zip(*columns, strict=True):
                if any((other is None) != (examples is None) for other in others):
                    raise ValueError("a client must have all of examples, right, entropy and mutual_information")
                if examples is not None and (len(examples) != len(self.edges) - 1 or not sum(examples)):
                    raise ValueError("a client's examples must be counted by bin")
            if any(counts is not None and len(counts) != len(self.edges) - 1 for counts in one.right):
                raise ValueError("a client's right predictions must be counted by bin")
        return self


class _Mapped(FileObject):
    round: Count
    explained: Pair
    xy: list[Pair | None]
    descriptors: str

    @model_validator(mode="after")
    def _of_each_client(self) -> _Mapped:
        size = len(base64.b64decode(self.descriptors, validate=True))  # 32-bit floats
        if size % (4 * max(1, len(self.xy))):
            raise ValueError("there must be one descriptor for each client")
        return self


class _Points(_Clients):
    majority: list[Count] = Field(alias="class")


class _Descriptors(FileObject):
    round: Annotated[list[Count], Field(min_length=1)]
    spearman: list[Number | None]
    spearman_std: list[Number | None]
    excluded: list[Count]
    clients: _Points
    maps: Annotated[list[_Mapped], Field(min_length=1)]

    @model_validator(mode="after")
    def _lengths(self) -> _Descriptors:
        if {len(self.spearman), len(self.spearman_std), len(self.excluded)} != {len(self.round)}:
            raise ValueError("there must be one coefficient for each round")
        points: tuple[list[Any], ...] = (self.clients.seen, self.clients.majority, *(each.xy for each in self.maps))
        if {*map(len, points)} != {len(self.clients.ids)}:
            raise ValueError("there must be one entry for each client")
        return self


class _Row(FileObject):
    """Line of ``clients.csv``."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str
    seen: Annotated[str, Field(pattern="^(true|false)$")]
    train: Annotated[str, Field(pattern="^[0-9]+$")]
    labels: str

    @model_validator(mode="after")
    def _numbers(self) -> _Row:
        predictors = ("personal_", "global_")
        measured = {key: text for key, text in (self.__pydantic_extra__ or {}).items() if key.startswith(predictors)}
        wrong = next((key for key, text in measured.items() if not re.fullmatch(r"([0-9.e+-]*[0-9])?", text)), None)
        if wrong is not None or not any(key.startswith("personal_") for key in measured):
            raise ValueError(f"{wrong or 'personal_...'} must be a number, or empty")
        return self


class _Example(FileObject):
    id: str
    seen: bool
    true: Annotated[list[list[Number]], Field(min_length=1)]
    predicted: list[list[Number]]
    image: list[list[Count | list[Count]]] | None = None

    @model_validator(mode="after")
    def _alike(self) -> _Example:
        if len({len(row) for row in (*self.true, *self.predicted)}) != 1 or len(self.true) != len(self.predicted):
            raise ValueError("there must be a prediction for each target")
        return self


class _Examples(FileObject):
    round: Count
    task: Literal["regression", "segmentation"]
    names: list[str]
    outputs: Annotated[Count, Field(ge=1)]
    clients: list[_Example]


class _Outputs(FileObject):
    round: Count
    names: Annotated[list[str], Field(min_length=1)]
    metrics: list[str]
    personal: dict[str, list[dict[str, Number | None]] | None]
    all: dict[str, list[dict[str, Number | None]] | None] | None = Field(alias="global")

    @model_validator(mode="after")
    def _of_each(self) -> _Outputs:
        for rows in (*self.personal.values(), *(self.all or {}).values()):
            if rows is not None and len(rows) != len(self.names):
                raise ValueError("there must be one entry for each name")
            if any({"true", *self.metrics} - row.keys() for row in rows or ()):
                raise ValueError("an entry must have true, and every metric")
        return self


_FILES: Mapping[str, Any] = {
    AUDIT: AuditFile,
    "outputs.json": _Outputs,
    "examples.json": _Examples,
    "summary.json": _Summary,
    "confusion.json": _Confusion,
    "calibration.json": _Calibration,
    "uncertainty.json": _Uncertainty,
    "descriptors.json": _Descriptors,
    "metrics.jsonl": list[_Evaluation],
    "journal.jsonl": list[_Attempt],
    "clients.csv": list[_Row],
}
_LISTS: Mapping[str, Callable[[RunFolder], Sequence[Any]]] = {
    "metrics.jsonl": lambda run: list(run.metrics()),
    "journal.jsonl": lambda run: list(run.objects("journal.jsonl")),
    "clients.csv": lambda run: run.clients(),
}


def checked(run: RunFolder, name: str) -> dict[str, Any]:
    """Return the object in a JSON file after validating it.

    Raises
    ------
    DataError
        If the file is missing, not JSON, or malformed; names the key and the fault.
    """
    found = run.json(name)
    _check(run, name, _FILES[name], found)
    return found


def check_files(run: RunFolder, names: Sequence[str]) -> None:
    """Raise if any existing file is malformed or belongs to another run.

    Raises
    ------
    DataError
        For the first such file; names the key and the fault.
    """
    for name in names:
        if name in _FILES and (run.path / name).exists():
            _check(run, name, _FILES[name], _LISTS[name](run) if name in _LISTS else run.json(name))
    if "partition.json" in names:
        _check_classes(run, len(run.manifest().class_names), names)


def check_compared(run: RunFolder) -> None:
    """Raise if a finished run has a file that a comparison cannot read.

    Raises
    ------
    DataError
        For the first such file; names the key and the fault.
    """
    summary = checked(run, "summary.json")
    method = summary["algorithm"]
    check_files(run, ("clients.csv",))
    lines = list(run.metrics())
    _check(run, "metrics.jsonl", list[_Compared], lines)
    for name, line in (("summary.json", summary), *(("metrics.jsonl", line) for line in lines)):
        own = line.get(method, {})
        if not isinstance(own, dict) or (line["global"] is None) != (summary["global"] is None):
            raise DataError(f"{run.path / name}: is damaged: it must have {method} and global like the other rounds")
        _check(run, name, _Group | None, own.get("users"))
    if not all(row.get("test", "").isdecimal() for row in run.clients()):
        raise DataError(f"{run.path / 'clients.csv'}: is damaged, at test: numbers of examples are missing")


def _check_classes(run: RunFolder, classes: int, names: Sequence[str]) -> None:
    """Raise if a file refers to classes that the partition does not have."""
    found: list[tuple[str, int]] = []
    if "confusion.csv" in names:
        pairs = (pair for pairs in run.confusions().values() for pair in pairs)
        found += [("confusion.csv", max(true, predicted)) for true, predicted, _ in pairs]
    if "descriptors.json" in names:
        found += [("descriptors.json", each) for each in run.json("descriptors.json")["clients"]["class"]]
    for name, number in found:
        if number >= classes:
            raise DataError(f"{run.path / name}: has class {number}, but the partition has {classes} classes")


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _check(run: RunFolder, name: str, schema: Any, content: Any) -> None:
    """Raise DataError unless the content of a file fits its schema."""
    try:
        _adapter(schema).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise DataError(f"{run.path / name}: is damaged, at {key}: {first['msg']:.200}") from None
