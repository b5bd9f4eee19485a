"""Policy of a member: a YAML file of limits within which its worker takes part (docs/member.md)."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import time
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedloom.core.files import read_file
from fedloom.core.home import expanded
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError, argument, spelled
from fedloom.experiment.validation_errors import KeyPath, dotted, validate
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.privacy.gaussian_mechanism import MAX_DELTA
from fedloom.privacy.settings import SMALLEST_SUM

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Bytes, by unit."""

MEASURES: Mapping[str, tuple[str, ...]] = {
    "counts": ("accuracy", "loss", "log_loss"),
    "confusion": ("confusion", "balanced_accuracy", "micro_f1", "macro_f1"),
    "calibration": ("calibration", "ece"),
    "uncertainty": ("uncertainty",),
    "models": ("spread",),
}
"""Names in ``metrics`` that let a field of an evaluation's answer leave; other metrics are in the field ``sums``."""

MOMENTS = "moments"
"""Name in ``metrics`` that lets the sums of the inputs leave, for a measured normalization."""


def _parse_size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", value.strip())
    if found is None:
        raise ValueError(f"must be a number of bytes, such as 500MB; units are {', '.join(UNITS)} (got {value!r})")
    return int(float(found[1]) * UNITS[found[2]])


Size = Annotated[
    int,
    BeforeValidator(_parse_size, json_schema_input_type=int | str),
    Field(ge=1),
]
"""Number of bytes, with or without a unit."""


@dataclass(frozen=True)
class Hours:
    """Daily span of local time, the end excluded; it may pass midnight."""

    start: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Return the hours of ``20:00-06:00``; raise ValueError if the text is something else."""
        found = re.fullmatch(r"(\d\d:\d\d) ?- ?(\d\d:\d\d)", text.strip())
        try:
            start, end = (time.fromisoformat(each) for each in found.groups()) if found else (time(), time())
        except ValueError:
            start = end = time()
        if start == end:
            raise ValueError(f"must be two different times, such as 20:00-06:00 (got {text!r})")
        return cls(start, end)

    def contains(self, now: time) -> bool:
        """Return whether a time is within these hours."""
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end


def _check_hours(text: str) -> str:
    Hours.parse(text)
    return text


class TrafficLimits(Settings):
    """Limits on network traffic of the worker, both directions together."""

    per_round: Size | None = Field(
        default=None,
        description="Bytes of messages for one round and the evaluation after it, repetitions included; null: no "
        "limit.",
    )
    per_day: Size | None = Field(
        default=None,
        description="Bytes on the wire per day of local time, over all connections; needs a folder. The worker "
        "disconnects until midnight when they are used up. Null: no limit.",
    )


class PolicyPrivacy(Settings):
    """Least privacy of training, which the member counts itself from what it was asked."""

    unit: Literal["clients", "examples"] = Field(
        default="examples",
        description="Least unit that training must protect: examples (protecting whole clients suffices), or clients.",
    )
    noise_multiplier: float | None = Field(default=None, gt=0, description="Least noise multiplier; null: any.")
    epsilon: float | None = Field(default=None, gt=0, description="Largest ε of a client in one run; null: any.")
    epsilon_total: float | None = Field(
        default=None,
        gt=0,
        description="Largest ε of a client over all runs of this folder and the ledger, for replacing one example; "
        "null: any.",
    )
    ledger: str | None = Field(
        default=None, min_length=1, description="Ledger whose trainings and requests count in epsilon_total."
    )
    delta: float = Field(default=1e-5, gt=0, le=MAX_DELTA, description="δ at which ε is computed.")

    @model_validator(mode="after")
    def _ledger_counts(self) -> Self:
        if self.ledger is not None and self.epsilon_total is None:
            raise ValueError(f"ledger: needs epsilon_total, in which it counts (got {self.ledger})")
        if self.epsilon is not None and self.epsilon_total is not None and self.epsilon > self.epsilon_total:
            raise ValueError(f"epsilon: must be at most epsilon_total, {self.epsilon_total:g} (got {self.epsilon:g})")
        return self


class Policy(Settings):
    """Limits within which a member's worker takes part; a key that is left out sets no limit."""

    methods: tuple[str, ...] | dict[str, str | None] | None = Field(
        default=None,
        description="Methods that may run: a list of names, or a mapping from a name to the digest of its code, which "
        "a method that is not FedLoom's own needs (`fedloom member show --methods` prints it).",
    )
    only_sums: bool = Field(
        default=False,
        description="Require secure aggregation with signed keys, and at least the default graph, so that nobody sees "
        "the update of a single client.",
    )
    smallest_cohort: int | None = Field(
        default=None,
        ge=SMALLEST_SUM,
        description="Least number of clients in a sum that this member helps to reveal. Needs only_sums, because a "
        "member cannot verify any other cohort.",
    )
    privacy: PolicyPrivacy | None = Field(default=None, description="Least differential privacy of training.")
    largest_model: Size | None = Field(
        default=None,
        description="Largest model in bytes, and largest tensor that a question may carry for a client.",
    )
    traffic: TrafficLimits = Field(default=TrafficLimits(), description="Limits on network traffic.")
    hours: Annotated[str, AfterValidator(_check_hours)] | None = Field(
        default=None,
        description="Hours of local time in which the worker is connected, such as 20:00-06:00; outside it waits.",
    )
    metrics: tuple[str, ...] | None = Field(
        default=None,
        description="Measurements that may leave: names of metrics, confusion, calibration, uncertainty, and moments "
        "(sums of the inputs, for a measured normalization). Others are sent as zeros. Null: all.",
    )
    class_counts: bool | None = Field(
        default=None,
        description="false: numbers of examples per class may not leave, in announcements or confusion matrices.",
    )
    personalization: bool = Field(
        default=True,
        description="false: outside training rounds answer plain evaluations alone, whose answers are measurements: "
        "no evaluation after own steps (evaluation.own_steps), and no method that must know something of a client "
        "(such as PeFLL's descriptor) to make its model.",
    )
    factories: tuple[str, ...] | None = Field(
        default=None,
        description="Factories and metrics, package:function, that an aggregator may name, beside FEDLOOM_FACTORIES.",
    )
    approve: Literal["any", "listed", "ask"] = Field(
        default="any",
        description="Experiments that may run: any that the other keys allow, those listed in experiments, or those "
        "approved by `fedloom member approve`.",
    )
    experiments: tuple[Annotated[str, Field(pattern="^[0-9a-f]{16}$")], ...] = Field(
        default=(), description="Digests of the experiments that may run, with approve: listed."
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of approvals and counts, relative to the policy's file; null: that of --states.",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.smallest_cohort is not None and not self.only_sums:
            raise ValueError(
                "smallest_cohort: needs only_sums: true, because a member can verify no cohort without signed sums "
                f"(got {self.smallest_cohort})"
            )
        if self.approve == "listed" and not self.experiments:
            raise ValueError("experiments: must list at least one digest with approve: listed (got none)")
        if self.experiments and self.approve != "listed":
            raise ValueError(f"experiments: is only for approve: listed (got approve: {self.approve})")
        if self.class_counts is False and "confusion" in (self.metrics or ()):
            raise ValueError("metrics: confusion tells class counts, which class_counts: false forbids")
        return self


@dataclass(frozen=True)
class PolicyFile:
    """Policy with its source, for messages that name its lines.

    Attributes
    ----------
    origins
        Line of each key.
    is_file
        False if it stands for the option ``--only-sums`` alone.
    """

    policy: Policy
    source: str
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    is_file: bool = True

    def place(self, *path: str) -> str:
        """Return the place of a key, such as ``policy.yaml:7: only_sums``; without a line if it is at its default."""
        if not self.is_file:
            return spelled(argument(path[-1]))
        known = (path[:length] for length in range(len(path), 0, -1))
        line = next((self.origins[each] for each in known if each in self.origins), "")
        number = line.rpartition(" ")[2] if line.startswith("line ") else ""
        return f"{Path(self.source).name}{f':{number}' if number else ''}: {dotted(path)}"

    @functools.cached_property
    def hours(self) -> Hours | None:
        """Hours in which the worker is connected; None for always."""
        return None if self.policy.hours is None else Hours.parse(self.policy.hours)

    @property
    def needs_folder(self) -> str | None:
        """Dotted key that needs a folder; None if none does."""
        policy, privacy = self.policy, self.policy.privacy
        if policy.approve == "ask":
            return "approve"
        if policy.traffic.per_day is not None:
            return "traffic.per_day"
        for key in ("epsilon", "epsilon_total"):
            if privacy is not None and getattr(privacy, key) is not None:
                return f"privacy.{key}"
        return None

    def relative(self, path: str) -> Path:
        """Return a path that the policy names, which is relative to its file."""
        return Path(self.source).parent / expanded(path)

    def folder(self, states: str | None) -> Path | None:
        """Return the folder of approvals and counts; None if there is none.

        ``states`` is the worker's folder of states, if it is on this machine. Raise ExperimentError if the policy needs
        a folder and there is none.
        """
        if self.policy.folder is not None:
            return self.relative(self.policy.folder)
        if states is None and (key := self.needs_folder) is not None:
            raise ExperimentError(
                f"{self.place(*key.split('.'))} needs a folder that outlives this process; set `folder`, or give "
                f"{argument('states')} a folder of this machine.",
                key="folder",
            )
        return None if states is None else Path(states)


def load_policy(path: str | Path, *, only_sums: bool = False) -> PolicyFile:
    """Read a policy; ``only_sums`` adds that key.

    Raise ExperimentError if the file cannot be read, has an unknown key, or contradicts itself.
    """
    source = expanded(path)
    try:
        text = read_file(source).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ExperimentError(f"{argument('policy')}: {path} cannot be read: {why}", key="policy") from error
    value, origins = parse_yaml(text, str(path))
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ExperimentError(f"{path} must be a mapping with keys such as methods and only_sums.", key="policy")
    if only_sums and value.get("only_sums") is False:
        raise ExperimentError(
            f"{path}: only_sums is false, and {argument('only_sums')} is given; remove one of them.",
            key="only_sums",
            found=False,
        )
    if only_sums:
        value["only_sums"] = True
    return PolicyFile(validate(Policy, value, str(path), origins), str(source), origins)


def only_sums_policy() -> PolicyFile:
    """Return the policy of ``--only-sums`` alone."""
    return PolicyFile(Policy(only_sums=True), "", is_file=False)


def code_digest(kind: type) -> str | None:
    """Return the digest of the code of a class's package; None for FedLoom's own.

    It covers the Python files of the top-level package or module, and nothing that this imports.
    """
    top = kind.__module__.partition(".")[0]
    if top == "fedloom":
        return None
    found = getattr(sys.modules[top], "__file__", None)
    if found is None:  # a namespace package: only the class's own module
        found = sys.modules[kind.__module__].__file__ or ""
    path = Path(found)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for each in files:
        content = each.read_bytes()
        digest.update(f"{each.relative_to(path.parent)} {len(content)}\n".encode())
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def permitted_fields(policy: Policy, names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the fields of an evaluation's answer that may leave; ``names`` are the metrics that need each field."""
    for each, needed in names.items():
        if policy.class_counts is False and each == "confusion":
            continue
        if policy.metrics is None or any(name in policy.metrics for name in needed):
            yield each
