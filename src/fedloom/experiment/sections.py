"""Sections of an experiment file, each a frozen pydantic model, and the whole, :class:`Experiment`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from fedloom.algorithms.base import available, find_algorithm
from fedloom.core.home import expanded
from fedloom.core.settings import Settings
from fedloom.core.urls import is_url
from fedloom.data.assignment import PartitionSettings
from fedloom.data.augment import Augment
from fedloom.data.datasets import DATASETS, Dataset
from fedloom.data.folders import data_root
from fedloom.data.local import LOCAL, LocalFiles, local_source
from fedloom.data.manifest import MeasuredOn
from fedloom.data.own import OWN, Own
from fedloom.data.schemes import Scheme, unseen_count
from fedloom.errors import ExperimentError
from fedloom.experiment.validation_errors import abbreviated
from fedloom.experiment.yaml_reader import as_yaml_document
from fedloom.models.registry import ModelSettings
from fedloom.privacy.settings import SecureAggregation, TrainingPrivacy
from fedloom.storage import location_of
from fedloom.tasks.names import ALIASES, METRICS, Headline
from fedloom.tasks.own_metric import MEMORY
from fedloom.tasks.registry import TaskSettings


class Section(Settings):
    """Base of all sections; unlike plain :class:`Settings`, it rejects infinity and NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


def datasets() -> list[str]:
    """Return the values allowed for ``data.dataset``: the registered sources and the local data sets."""
    return [*sorted(DATASETS), *LOCAL]


def _not_among(allowed: Sequence[str]) -> PydanticCustomError:
    return PydanticCustomError("unknown_name", "must be one of {allowed}", {"allowed": ", ".join(allowed)})


def _known_dataset(name: str) -> str:
    if name not in datasets():
        raise _not_among(datasets())
    return name


def _folder(text: str) -> str:
    if "://" in text:
        raise ValueError(f"must be a folder of this machine (got {abbreviated(text)})")
    return text


def _absolute(path: str) -> str:
    return str(expanded(path).absolute())


def _located_source(source: LocalFiles, dataset: str) -> LocalFiles:
    """Return a source with absolute paths; the name of a data set in the cache stays."""
    by_name = dataset == "huggingface" and not expanded(source.path).exists()
    changed: dict[str, Any] = {} if by_name else {"path": _absolute(source.path)}
    if source.text is not None:
        changed["text"] = source.text.model_copy(update={"tokenizer": _absolute(source.text.tokenizer)})
    return source.model_copy(update=changed)


def _place(text: str) -> str:
    try:
        location_of(text)
    except ExperimentError as error:
        raise ValueError(str(error)) from None
    return text


class Data(Section):
    """Data set, and its partition into clients."""

    dataset: Annotated[str, AfterValidator(_known_dataset)] = Field(
        description="Name of the data set; folder, table and arrays stand for your own data at `source`.",
        json_schema_extra={"enum": list[JsonValue](datasets())},
    )
    source: LocalFiles | None = Field(default=None, description="For your own data: location and format.")
    root: Annotated[str, AfterValidator(_folder)] | None = Field(
        default=None,
        min_length=1,
        description="Folder for data sets and partitions; null: $FEDLOOM_DATA, else ~/.cache/fedloom.",
    )
    partition: Scheme = Field(description="Assignment of the data to clients.")
    held_out_fraction: float = Field(default=0.1, ge=0, lt=1, description="Fraction of clients held out of training.")
    validation_fraction: float = Field(
        default=1 / 6, gt=0, lt=1, description="Fraction of the official training set held out for validation."
    )
    normalization: MeasuredOn = Field(
        default="seen",
        description=(
            "Training examples whose mean and standard deviation normalize all inputs. seen: those of seen clients; "
            "pool: all, as in publications that use the data set's own figures."
        ),
    )

    augment: Augment = ()

    def partition_settings(self, seed: int) -> PartitionSettings:
        """Return the settings of a partition with this seed."""
        return PartitionSettings(
            self.partition, seed, self.held_out_fraction, self.validation_fraction, self.normalization
        )

    def opened(self) -> Dataset:
        """Return the source; a local data set is read unless it has been read before.

        Raise ExperimentError if ``source`` is wrong here, or names nothing that can be read; DataError if its content
        is invalid.
        """
        if self.dataset in LOCAL:
            if self.source is None:
                raise ExperimentError(
                    f"data.source is missing; set it to the location of the {self.dataset}: {{path: ...}}",
                    key="data.source",
                )
            return local_source(self.dataset, self.source, self.root)
        if self.source is not None:
            raise ExperimentError(f"data.source is only for {', '.join(LOCAL)} (got {self.dataset})", key="data.source")
        return DATASETS[self.dataset]

    @property
    def folder(self) -> Path:
        """Folder of data sets and partitions on this machine."""
        return data_root(self.root)

    @property
    def seen(self) -> int | None:
        """Number of seen clients, the length of the roster; None if only the data determine the number of clients."""
        clients = self.partition.clients
        return None if clients is None else clients - unseen_count(clients, self.held_out_fraction)


class OwnData(Section):
    """Requirements on clients' own data."""

    own: Own = Field(description="Requirements on every client's data, in place of `dataset` and `partition`.")
    augment: Augment = ()

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, value: Any) -> Any:
        others = [key for key in Data.model_fields if key not in cls.model_fields]
        other = next((key for key in others if isinstance(value, dict) and key in value), None)
        if other is not None:
            raise ValueError(f"{other}: cannot be combined with own; give own alone, or dataset and partition")
        return value

    @property
    def dataset(self) -> str:
        """Name of the data set in manifests and summaries."""
        return OWN

    @property
    def seen(self) -> None:
        """None: the number of clients depends on which ones connect."""


def _data_tag(value: Any) -> str:
    return "brought" if isinstance(value, OwnData) or (isinstance(value, dict) and "own" in value) else "dealt"


class AlgorithmChoice(Settings):
    """Name of a method, and its settings."""

    name: str
    settings: Settings


def _choose_algorithm(value: Any) -> AlgorithmChoice:
    if isinstance(value, AlgorithmChoice):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("mapping", "must be a mapping with a name")
    name, keys = value.get("name"), {key: item for key, item in value.items() if key != "name"}
    if name not in available():
        kind = _not_among(available()) if "name" in value else "missing"
        detail = InitErrorDetails(type=kind, loc=("name",), input=name)
        raise ValidationError.from_exception_data("name", [detail])  # merged into the errors of the whole file
    # Through JSON, where strict validation still accepts a list for a tuple.
    settings = find_algorithm(name).settings.model_validate_json(json.dumps(keys), strict=True)
    return AlgorithmChoice(name=name, settings=settings)


def _dump_algorithm(choice: AlgorithmChoice) -> dict[str, Any]:
    return {"name": choice.name, **choice.settings.model_dump(mode="json")}


AlgorithmSection = Annotated[AlgorithmChoice, PlainValidator(_choose_algorithm), PlainSerializer(_dump_algorithm)]
"""Type of the section: the name and the settings in one mapping."""


class EarlyStopping(Section):
    """Early stopping by the task's headline metric on validation data, pooled over the clients that train."""

    at_least: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Stop once the metric reaches this value, for metrics where higher is better, such as accuracy.",
    )
    at_most: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Stop once the metric falls to this value, for metrics where lower is better, such as RMSE.",
    )
    not_better_for: int | None = Field(
        default=None, ge=1, description="Stop once the metric has not improved for this many rounds."
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> EarlyStopping:
        if sum(value is not None for value in (self.at_least, self.at_most, self.not_better_for)) != 1:
            raise ValueError("give one of at_least, at_most and not_better_for")
        return self

    def check(self, headline: Headline) -> None:
        """Raise ExperimentError if the threshold is for metrics of the other direction than this one."""
        wrong, right = ("at_most", "at_least") if headline.higher_is_better else ("at_least", "at_most")
        if (value := getattr(self, wrong)) is not None:
            better = "higher" if headline.higher_is_better else "lower"
            raise ExperimentError(
                f"federation.until.{wrong} is {value:g}, but training stops by {headline.title}, where {better} is "
                f"better; give {right} instead.",
                key=f"federation.until.{wrong}",
                found=value,
            )

    def is_reached(self, round: int, best_round: int, best_score: float) -> bool:
        """Return whether to stop after a round, given the best round so far and its score.

        A score is the metric, or minus the metric if lower is better.
        """
        if self.at_least is not None:
            return best_score >= self.at_least
        if self.at_most is not None:
            return -best_score <= self.at_most
        return round - best_round >= (self.not_better_for or 0)


class Federation(Section):
    """Settings of the training rounds."""

    rounds: int | None = Field(
        ge=0,
        description="Training rounds; 0 for a method without rounds; with data.own also null: no limit.",
    )
    until: EarlyStopping | None = Field(
        default=None,
        description="With data.own: ends the rounds early, after an evaluation, by the task's headline metric on the "
        "validation data of the clients that train, pooled (accuracy for classes): {at_least: A}, {at_most: A} where "
        "lower is better (RMSE, perplexity, losses), or {not_better_for: ROUNDS}.",
    )
    min_clients: int = Field(
        default=1,
        ge=1,
        description="With data.own: minimum number of connected training clients; rounds wait until it is reached.",
    )
    heartbeat_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="With data.own: seconds without a connection after which a client leaves the roster.",
    )
    clients_per_round: int = Field(default=5, ge=1, description="Number of seen clients sampled in each round.")
    deadline_s: float = Field(
        default=600.0, gt=0, description="Seconds to wait for a client's answer before it counts as lost."
    )
    min_replies: int = Field(
        default=1,
        ge=1,
        description="Minimum number of clients that must answer every exchange of a round; no minimum where "
        "privacy.sampling is poisson.",
    )
    attempts: int = Field(
        default=3, ge=1, description="Failed attempts at one round after which the run stops; it can be resumed."
    )
    checkpoint_every_s: float = Field(
        default=30.0, ge=0, description="Seconds between checkpoints; 0: after every round."
    )
    lost_state: Literal["refuse", "afresh"] = Field(
        default="refuse",
        description=(
            "Clients whose state of earlier rounds is lost: excluded (refuse), or restarted without it (afresh)."
        ),
    )
    secure_aggregation: SecureAggregation | None = Field(
        default=None,
        description="Secure aggregation: the aggregator learns sums over a cohort, and no client's own answer; null: "
        "none.",
    )
    privacy: TrainingPrivacy | None = Field(
        default=None, description="Differential privacy of training, of clients or of examples; null: none."
    )

    @model_validator(mode="after")
    def _shares_of_noise_are_summed(self) -> Self:
        if self.privacy is not None and self.privacy.noise == "distributed" and self.secure_aggregation is None:
            raise ValueError("privacy.noise: distributed needs secure_aggregation; set it, or noise to central")
        return self


def _metric(name: str) -> str:
    """Return the name of a metric: one of FedLoom's, or ``package:function``."""
    allowed, own = [*METRICS, *ALIASES], name.removeprefix(MEMORY)
    if name.startswith(MEMORY) and not own.isidentifier():
        raise ValueError(f"define the metric with `def` or `class`, which name it (got {own})")
    if not name.startswith(MEMORY) and not re.fullmatch(r"[A-Za-z_][\w.]*:[\w.]+", name) and name not in allowed:
        raise ValueError(f"must be package:function, or one of {', '.join(allowed)} (got {abbreviated(name)})")
    return name


class Evaluation(Section):
    """Schedule and settings of evaluation."""

    every: int = Field(
        default=50, ge=1, description="Rounds between evaluations; round 0 and the last are always evaluated."
    )
    label_mask: bool = Field(
        default=False, description="Report results in which labels that a client never trains on are excluded."
    )
    cohort: int = Field(default=20, ge=1, description="Clients in one evaluation conversation.")
    batch_size: int = Field(default=512, ge=1, description="Examples in one forward pass of an evaluation.")
    metrics: tuple[Annotated[str, AfterValidator(_metric)], ...] = Field(
        default=(),
        description=(
            "Additional metrics: auroc for classification, and your own as `package:function` "
            "(docs/evaluation.md#more-metrics)."
        ),
    )
    own_steps: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        min_length=1,
        description=(
            "Numbers of local steps after which the unseen clients' models are evaluated at the end, starting from "
            "the model that they receive (local: from a random start), such as [0, 1, 2, 5, 10, 20, 50]; `fedloom "
            "compare` draws the results. Null: none."
        ),
    )

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        steps = self.own_steps or ()
        if any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"own_steps: must be numbers of steps in ascending order (got {list(steps)})")
        return self


class WorkerRuntime(Section):
    """Resources of one worker."""

    threads: int = Field(default=1, ge=1, description="Torch threads of each process, including the aggregator.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Device of the workers.")
    clients_at_once: int = Field(
        default=1,
        ge=1,
        description="Clients vectorized together: faster on a GPU, and for many small clients on a CPU. Rounding then "
        "depends on which clients are together, so a run is reproducible only with the same workers and the same "
        "number here.",
    )
    save_every_s: float | None = Field(
        default=60.0, gt=0, description="Largest number of seconds of local training lost in a kill; null: no saves."
    )


class Runtime(WorkerRuntime):
    """Resources used on this machine: processes, threads, device."""

    workers: int = Field(default=2, ge=0, description="Worker processes; 0: train in the aggregator's process.")


class WorkerSettings(Section):
    """Settings of ``fedloom worker``, which each worker sets for itself."""

    runtime: WorkerRuntime = WorkerRuntime()
    bandwidth: str | None = Field(default=None, description="Limit on network traffic; null: none.")
    class_counts: bool = Field(default=False, description="Send the aggregator the clients' class counts.")
    model_format: str = Field(default=".safetensors", description="Format of the models that the worker keeps.")
    log: str | None = Field(default=None, description="File for the log, as JSON lines.")


class Experiment(Section):
    """Complete configuration of a run."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run's folder: letters, digits, dots, hyphens and underscores.",
    )
    seed: int = Field(
        default=1, ge=0, lt=2**63, description="Seed of all random choices: partition, initialization, rounds."
    )
    data: Annotated[
        Annotated[Data, Tag("dealt")] | Annotated[OwnData, Tag("brought")],
        Discriminator(_data_tag),
    ] = Field(description="Data set and its partition, or the requirements on clients' own data.")
    task: TaskSettings | None = Field(
        default=None,
        description="Prediction task, and settings of its loss. Null: the task of the data, with defaults.",
    )
    model: ModelSettings = Field(discriminator="name", description="The clients' model.")
    algorithm: AlgorithmSection = Field(description="The method, and its settings.")
    federation: Federation = Field(description="Settings of the training rounds.")
    evaluation: Evaluation = Field(default=Evaluation(), description="Schedule and settings of evaluation.")
    runtime: Runtime = Field(default=Runtime(), description="Processes, threads and device on this machine.")
    storage: Annotated[str, AfterValidator(_place)] | None = Field(
        default=None,
        min_length=1,
        description=(
            "Storage of runs: a folder with a subfolder per run; or s3://BUCKET/PREFIX, where runs in ./runs are "
            "published while they run (docs/storage.md); or pvc://CLAIM/PATH, for pods that mount the claim. Null: "
            "./runs."
        ),
    )

    tracking: tuple[str, ...] = Field(
        default=(),
        description="Trackers that also receive the run's numbers: csv, katib, tensorboard, mlflow, wandb, or trackers "
        "that packages add by the entry point fedloom.observers (docs/metrics.md). They do not affect results.",
    )

    @model_validator(mode="after")
    def _pass_task(self) -> Self:
        """Pass the experiment's task to a local data set, unless its source names one."""
        data = self.data
        if self.task is not None and isinstance(data, Data) and data.source is not None and data.source.task is None:
            source = data.source.model_copy(update={"task": self.task.target_kind})
            object.__setattr__(self, "data", data.model_copy(update={"source": source}))
        return self

    @property
    def runs(self) -> Path:
        """Parent folder of the run's own folder."""
        return expanded("runs" if self.storage is None or is_url(self.storage) else self.storage)

    @property
    def protects_examples(self) -> bool:
        """True if training protects single examples of clients (``federation.privacy.of: examples``)."""
        privacy = self.federation.privacy
        return privacy is not None and privacy.of == "examples"

    @property
    def code(self) -> tuple[str, ...]:
        """Names of the user's own code: the factory of the model, and metrics."""
        factory = getattr(self.model, "factory", None)
        return (*([] if factory is None else [factory]), *(name for name in self.evaluation.metrics if ":" in name))

    def located(self) -> Experiment:
        """Return the experiment with absolute paths, as a run records it; relative ones start in the current folder."""
        changed: dict[str, Any] = {}
        if isinstance(self.data, Data):
            of_data: dict[str, Any] = {}
            if self.data.root is not None:
                of_data["root"] = _absolute(self.data.root)
            if self.data.source is not None:
                of_data["source"] = _located_source(self.data.source, self.data.dataset)
            changed["data"] = self.data.model_copy(update=of_data)
        if self.storage is not None and not is_url(self.storage):
            changed["storage"] = _absolute(self.storage)
        return self.model_copy(update=changed)

    def resolved_yaml(self) -> str:
        """Return the experiment with every default filled in, as YAML that is read to the same experiment."""
        return as_yaml_document(self.model_dump(mode="json"))

    def shared_json(self) -> str:
        """Return the JSON sent to workers: all but ``runtime``, ``storage``, ``tracking`` and the location of the data.

        Equal experiments give equal text.
        """
        shared = self.model_dump(
            mode="json",
            exclude={"runtime": True, "storage": True, "tracking": True, "data": {"root": True, "source": True}},
        )
        return json.dumps(shared, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
