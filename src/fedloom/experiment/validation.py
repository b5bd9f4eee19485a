"""Validation of a mapping into an :class:`Experiment`, and the JSON schema of an experiment file."""

from __future__ import annotations

import copy
import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model

import fedloom
from fedloom.algorithms.base import Algorithm, available, find_algorithm
from fedloom.algorithms.requirements import check_example_privacy
from fedloom.core.words import first_of, printable
from fedloom.data.augment import check_augment
from fedloom.data.datasets import Dataset
from fedloom.data.local import log_notes
from fedloom.data.spec import DataSpec
from fedloom.errors import ExperimentError, RefusedError
from fedloom.experiment.sections import Data, Experiment, Federation, OwnData
from fedloom.experiment.validation_errors import SET, KeyPath, SettingError, dotted, explain, listing
from fedloom.models.fitting import fitted
from fedloom.models.module import MEMORY
from fedloom.models.registry import ModuleSettings, VGGSettings
from fedloom.privacy.adaptive_clip import default_count_noise, update_multiplier
from fedloom.privacy.clipped_sum import check_cohorts
from fedloom.privacy.settings import SMALLEST_SUM, SecureAggregation
from fedloom.tasks.own_metric import MEMORY as METRIC_IN_MEMORY
from fedloom.tasks.registry import agreed_task


def validated(
    value: dict[str, Any], source: str, origins: Mapping[KeyPath, str], *, combined: bool = True, sent: bool = False
) -> Experiment:
    """Return the experiment that a mapping describes.

    Raise ExperimentError, with the name of the ``source`` and the ``origins`` of keys, if a key or, with ``combined``,
    a combination of keys is invalid. Raise RefusedError if another process has ``sent`` a key that is unknown here.
    """
    try:
        experiment = Experiment.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        algorithm = value.get("algorithm")
        name = algorithm.get("name") if isinstance(algorithm, dict) else None
        schema = json_schema([name] if name in available() else None)
        errors = explain(error, schema, value)
        unknown = [printable(dotted(each.path), 80) for each in errors if each.text.startswith("unknown key")]
        if sent and unknown:
            keys, here = f"keys {first_of(unknown, 5)}", f"fedloom {fedloom.__version__}"
            reason = f"The {source} has {keys}, which {here} does not know."
            raise RefusedError(reason, key=unknown[0], hint="upgrade this worker") from None
        remaining = [m for m in errors if m.path[:1] == ("algorithm",) and m.text.startswith("unknown key")]
        renamed = origins.get(("algorithm", "name")) == SET and any(origins.get(m.path) != SET for m in remaining)
        # The file's other keys belong to the method that it names.
        hint = f"{SET}'algorithm={{name: {name}}}' replaces the whole section" if renamed else None
        raise ExperimentError(listing(source, errors, origins), hint=hint, key=dotted(errors[0].path)) from None
    if combined and (errors := check_compatibility(experiment)):
        raise ExperimentError(listing(source, errors, origins), key=dotted(errors[0].path))
    return experiment


def json_schema(algorithms: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of an experiment file, for editors and documentation.

    Parameters
    ----------
    algorithms
        Names of the methods whose settings may stand under ``algorithm``; default: all registered methods.
    """
    return copy.deepcopy(_schema(tuple(available() if algorithms is None else algorithms)))


@functools.cache
def _schema(algorithms: tuple[str, ...]) -> dict[str, Any]:
    choices: list[Any] = [_settings_with_name(name) for name in algorithms]
    field = Field(description=Experiment.model_fields["algorithm"].description)
    fields: dict[str, Any] = {"algorithm": (functools.reduce(operator.or_, choices), field)}
    whole = create_model("Experiment", __base__=Experiment, **fields)
    schema = whole.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


@functools.cache
def _settings_with_name(name: str) -> type[BaseModel]:
    settings = find_algorithm(name).settings
    fields: dict[str, Any] = {"name": (Literal[name], Field(description="Which method."))}
    return create_model(settings.__name__, __base__=settings, **fields)


@dataclass(frozen=True)
class _Combination:
    """Experiment with individually valid keys, and values shared by several checks."""

    experiment: Experiment

    @cached_property
    def algorithm(self) -> Algorithm:
        return find_algorithm(self.experiment.algorithm.name)

    @cached_property
    def source(self) -> Dataset | None:
        """Opened data set; None for clients with data of their own."""
        data = self.experiment.data
        return None if isinstance(data, OwnData) else data.opened()

    @property
    def spec(self) -> DataSpec:
        """Inputs and targets of the clients' examples."""
        data = self.experiment.data
        if isinstance(data, OwnData):
            return data.own.spec
        assert self.source is not None
        return data.partition.drawn_spec(self.source.spec)


Check = Callable[[_Combination], Iterator[SettingError]]


def check_compatibility(experiment: Experiment) -> list[SettingError]:
    """Return the combinations of keys that cannot run, each at the key to change."""
    combination = _Combination(experiment)
    try:
        source = combination.source
    except ExperimentError as error:  # data that cannot be opened allow no further checks
        fault = _error_of(error, "data.source", ("data.",))
        if fault.path == ("data", "source", "task") and experiment.task is not None:
            return [_error("task.name", fault.text)]  # by default the source has the experiment's task
        return [fault]
    if source is not None:
        log_notes(source.notes)
    errors = [error for check in DATA_CHECKS for error in check(combination)]
    if not errors:  # building a model for invalid data would only cause a follow-up error
        errors += _refused("model", _check_model, combination)
    return errors + [error for check in CHECKS for error in check(combination)]


def _error(key: str, text: str) -> SettingError:
    return SettingError(tuple(key.split(".")), text)


def _error_of(error: ExperimentError, key: str, prefix: tuple[str, ...] = ("",)) -> SettingError:
    """Return an error at the key that it names, as ``key`` or before a colon, or else at ``key``."""
    if error.key is not None:
        return _error(error.key, str(error).removeprefix(error.key).lstrip(": "))
    key_text, colon, text = str(error).partition(": ")
    if colon and re.fullmatch(r"[a-z_]+(\.\w+)*", key_text) and key_text.startswith(prefix):
        return _error(key_text, text)
    return _error(key, str(error))


def _check_population(c: _Combination) -> Iterator[SettingError]:
    """Check that the method can train with clients that join and leave."""
    e = c.experiment
    if isinstance(e.data, OwnData) and (fixed := c.algorithm.requires_fixed_population(e.algorithm.settings)):
        key, reason = fixed
        yield _error(f"algorithm.{key}", f"{reason} (with data.own, clients join and leave)")


def _refused(key: str, check: Callable[..., object], *arguments: Any) -> Iterator[SettingError]:
    """Yield the error that a check raises, at the key that it names, or else at ``key``."""
    try:
        check(*arguments)
    except ExperimentError as error:
        yield _error_of(error, key)


def _check_partition(c: _Combination) -> Iterator[SettingError]:
    data = c.experiment.data
    if not isinstance(data, OwnData) and c.source is not None:
        yield from _refused("data.partition", data.partition.check_data, c.source.spec)


def _check_model(c: _Combination) -> None:
    """Raise ExperimentError unless the model fits data, task and method, and can be trained as the experiment says."""
    e, spec = c.experiment, c.spec
    c.algorithm.check_inputs(spec.kind)
    task = agreed_task(e.task, spec.task, spec.outputs, "data.own" if c.source is None else e.data.dataset)
    model = fitted(e.model, spec.inputs, spec.outputs, task, () if spec.targets is None else spec.targets.shape).model
    c.algorithm.check_model(e.algorithm.settings, model)
    twice = c.algorithm.differentiates_twice(e.algorithm.settings)
    if e.protects_examples:
        check_example_privacy(c.algorithm, e.algorithm.settings)
    model.check_steps(clients=e.runtime.clients_at_once, twice=twice, examples=e.protects_examples)


def _check_moments(c: _Combination) -> Iterator[SettingError]:
    """Check that clients whose examples are protected send no sums over them for the normalization."""
    data = c.experiment.data
    sends = isinstance(data, OwnData) and data.own.normalization == "measured" and data.own.spec.numbers > 0
    if c.experiment.protects_examples and sends:
        yield _error(
            "data.own.normalization",
            "clients would send sums over their examples without noise (federation.privacy.of: examples); give "
            "{mean, std} (got measured)",
        )


def _check_augment(c: _Combination) -> Iterator[SettingError]:
    e = c.experiment
    if e.data.augment and not c.algorithm.augments:
        yield _error("data.augment", f"{c.algorithm.name} trains on all examples at once, unchanged; leave it out")
    else:
        yield from _refused("data.augment", check_augment, e.data.augment, c.spec)


def _check_rounds(c: _Combination) -> Iterator[SettingError]:
    e, rounds = c.experiment, c.experiment.federation.rounds
    if not c.algorithm.trains and rounds != 0:
        rounds_text = "null" if rounds is None else rounds
        yield _error("federation.rounds", f"must be 0, because {c.algorithm.name} has no rounds (got {rounds_text})")
    elif rounds is None and not isinstance(e.data, OwnData):
        yield _error("federation.rounds", "must be a number (got null, which is only for data.own)")


def _check_cohort(c: _Combination) -> Iterator[SettingError]:
    data, federation = c.experiment.data, c.experiment.federation
    seen = data.seen if isinstance(data, Data) and federation.rounds else None
    if isinstance(data, Data) and seen is not None and federation.clients_per_round > seen:
        yield _error(
            "federation.clients_per_round",
            f"must be at most {seen}, the number of seen clients of {data.partition.clients} with held_out_fraction "
            f"{data.held_out_fraction:g} (got {federation.clients_per_round})",
        )
    limits = ("min_clients", "clients_per_round") if isinstance(data, OwnData) else ("clients_per_round",)
    for limit in limits:
        if federation.min_replies > (most := getattr(federation, limit)):
            message = f"must be at most {limit}, {most} (got {federation.min_replies})"
            yield _error("federation.min_replies", message)


def _check_sums(c: _Combination) -> Iterator[SettingError]:
    """Check that sums suffice for the method if updates are summed securely or made private."""
    settings, federation = c.experiment.algorithm.settings, c.experiment.federation
    needs = []
    if federation.secure_aggregation is not None:
        needs.append("secure_aggregation")
        yield from _check_secure_cohort(c, federation.secure_aggregation)
        coarse = c.algorithm.needs_fine_sums(settings)
        if federation.secure_aggregation.bits == 32 and coarse is not None:
            yield _error("federation.secure_aggregation.bits", f"must be 64: {c.algorithm.name} {coarse} (got 32)")
    if federation.privacy is not None and federation.privacy.of == "clients":
        needs.append("privacy")
        if (weighting := getattr(settings, "weighting", "uniform")) != "uniform":
            yield _error(
                "algorithm.weighting",
                f"must be uniform with federation.privacy, so that a client's part of a sum is bounded by clip (got "
                f"{weighting})",
            )
    why = c.algorithm.sums_suffice(settings)
    for key in needs:
        if (reason := why or (c.algorithm.noisy_sums_suffice(settings) if key == "privacy" else None)) is not None:
            yield _error(f"federation.{key}", f"{c.algorithm.name} {reason}; leave it out, or choose another method")


def _check_count_noise(c: _Combination) -> Iterator[SettingError]:
    """Check that adaptive clipping does not reveal more than the noise multiplier allows."""
    privacy = c.experiment.federation.privacy
    if privacy is None or privacy.adaptive_clip is None or privacy.noise_multiplier is None:
        return
    noise = privacy.adaptive_clip.count_noise
    if noise is None:
        noise = default_count_noise(c.experiment.federation.clients_per_round)
    key = "federation.privacy.adaptive_clip.count_noise"
    yield from _refused(key, update_multiplier, privacy.noise_multiplier, noise)


def _check_draws(c: _Combination) -> Iterator[SettingError]:
    """Check that cohorts of private clients may be of any size that a draw gives them."""
    e, federation = c.experiment, c.experiment.federation
    privacy = federation.privacy
    if privacy is None or privacy.of != "clients" or privacy.sampling != "poisson":
        return
    if federation.min_replies > 1:
        yield _error(
            "federation.min_replies",
            f"must be 1 with federation.privacy.sampling: poisson, where small cohorts count, too (got "
            f"{federation.min_replies}); set sampling to fixed, or leave it out",
        )
    seen = e.data.seen if isinstance(e.data, Data) else None
    if federation.secure_aggregation is not None and seen:
        cohort = min(seen, federation.clients_per_round)
        yield from _refused("federation.clients_per_round", check_cohorts, seen, cohort, privacy.delta)


def _check_secure_cohort(c: _Combination, secure: SecureAggregation) -> Iterator[SettingError]:
    """Check that cohorts are large enough for secure sums, and for the number of neighbours."""
    federation, own = c.experiment.federation, isinstance(c.experiment.data, OwnData)
    if secure.signatures is None and own:
        yield _error(
            "federation.secure_aggregation.signatures",
            "must be set with data.own: keys or certificates, by which members verify each other, or none, if they "
            "trust the aggregator to relay their keys (got null)",
        )
    sums = c.algorithm.sums(c.experiment.algorithm.settings).values()
    weighted = any(field.weighting == "examples" for fields in sums for field in fields.values())
    if secure.examples is None and own and weighted:
        yield _error(
            "federation.secure_aggregation.examples",
            "must be set with data.own, to the largest number of training examples that a client may have, because "
            "answers are weighted by it and members cannot trust the aggregator to tell it (got null); or set "
            "algorithm.weighting: uniform",
        )
    for key in ("clients_per_round", "min_clients") if own else ("clients_per_round",):
        if (size := getattr(federation, key)) < SMALLEST_SUM:
            yield _error(
                f"federation.{key}",
                f"must be at least {SMALLEST_SUM} with secure_aggregation, because smaller sums reveal their terms "
                f"(got {size})",
            )
    if secure.neighbours is not None and secure.neighbours >= federation.clients_per_round >= SMALLEST_SUM:
        yield _error(
            "federation.secure_aggregation.neighbours",
            f"must be below clients_per_round, {federation.clients_per_round} (got {secure.neighbours}); null: by the "
            "size of the cohort",
        )


def _check_keys_of_own_data(c: _Combination) -> Iterator[SettingError]:
    if isinstance(c.experiment.data, OwnData):
        return
    for key in ("until", "min_clients", "heartbeat_timeout_s"):
        if getattr(c.experiment.federation, key) != Federation.model_fields[key].default:
            yield _error(f"federation.{key}", "is only for data.own; leave it out")


def _check_evaluation(c: _Combination) -> Iterator[SettingError]:
    e, algorithm = c.experiment, c.algorithm
    if e.evaluation.label_mask and not algorithm.labelled(e.algorithm.settings):
        message = f"must be false, because {algorithm.name} uses no labels with these settings (got true)"
        yield _error("evaluation.label_mask", message)
    if e.evaluation.own_steps is None:
        return
    if not isinstance(e.data, Data) or not e.data.held_out_fraction:
        place = "data.own" if isinstance(e.data, OwnData) else "held_out_fraction 0"
        yield _error("evaluation.own_steps", f"needs a data set with unseen clients (got {place})")
    try:
        algorithm.after_steps(e.algorithm.settings, 0)
    except ExperimentError as error:
        yield _error("evaluation.own_steps", str(error).partition(": ")[2] or str(error))


def _check_runtime(c: _Combination) -> Iterator[SettingError]:
    model, runtime = c.experiment.model, c.experiment.runtime
    if isinstance(model, ModuleSettings) and model.factory.startswith(MEMORY) and runtime.workers:
        message = f"must be 0 for a module in memory, unless model.factory names one (got {runtime.workers})"
        yield _error("runtime.workers", message)
    if any(name.startswith(METRIC_IN_MEMORY) for name in c.experiment.evaluation.metrics) and runtime.workers:
        yield _error("runtime.workers", f"must be 0 for a metric in memory (got {runtime.workers})")
    if runtime.clients_at_once > 1 and isinstance(model, VGGSettings) and model.norm == "batch":
        yield _error("runtime.clients_at_once", f"must be 1 with model.norm: batch (got {runtime.clients_at_once})")


DATA_CHECKS: tuple[Check, ...] = (_check_population, _check_partition, _check_augment, _check_moments)
CHECKS: tuple[Check, ...] = (
    _check_rounds,
    _check_cohort,
    _check_sums,
    _check_count_noise,
    _check_draws,
    _check_keys_of_own_data,
    _check_evaluation,
    _check_runtime,
)
