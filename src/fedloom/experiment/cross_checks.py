"""Checks for combinations of keys that cannot run."""

from __future__ import annotations

from fedloom.algorithms.base import find_algorithm
from fedloom.data.local import tell_notes
from fedloom.data.schemes import MeansScheme
from fedloom.errors import ExperimentError
from fedloom.experiment.sections import Data, Experiment, Federation, OwnData
from fedloom.experiment.validation_errors import Mistake
from fedloom.models.module import MEMORY
from fedloom.models.registry import ModuleSettings, VGGSettings


def check_compatibility(experiment: Experiment) -> list[Mistake]:
    """Return the combinations of keys that cannot run, each at the key to change."""
    found: list[Mistake] = []

    def refuse(key: str, text: str) -> None:
        found.append(Mistake(tuple(key.split(".")), text))

    data, federation, runtime = experiment.data, experiment.federation, experiment.runtime
    algorithm = find_algorithm(experiment.algorithm.name)
    if isinstance(data, OwnData):
        classes, shape, kind = len(data.own.classes), data.own.input_shape, data.own.kind
        closed = algorithm.requires_fixed_population(experiment.algorithm.settings)
        if closed is not None:
            key, why = closed
            refuse(f"algorithm.{key}", f"{why} (with data.own, clients come and go)")
    else:
        try:
            source = data.opened()
        except ExperimentError as error:
            key, _, text = str(error).partition(": ")
            if not key.startswith("data."):  # an error in the file, or in its reader
                key, text = "data.source", str(error)
            refuse(key, text)
            return found
        tell_notes(source.notes)
        classes, kind = source.classes, source.kind
        # The scheme ``means`` sets the shape of its examples.
        shape = (data.partition.dimension,) if isinstance(data.partition, MeansScheme) else source.input_shape
        try:
            data.partition.check(classes)
            data.partition.check_inputs(kind, shape)
        except ExperimentError as error:
            key, _, text = str(error).partition(": ")
            refuse(key, text)
        if algorithm.needs_classes and not classes:
            allowed = f"allowed with {algorithm.name}: all others"
            refuse("data.dataset", f"found {data.dataset}, which has no classes; {allowed}")
    if not found:  # a model for invalid data would only cause a follow-up error
        try:
            model = experiment.model.build(shape, classes, kind)
            algorithm.check_model(experiment.algorithm.settings, model)
        except ExperimentError as error:
            key, _, text = str(error).partition(": ")
            refuse(key, text)
    if not algorithm.trains and federation.rounds:
        refuse("federation.rounds", f"found {federation.rounds}; allowed: 0, because {algorithm.name} has no rounds")
    if (
        isinstance(data, Data)
        and federation.rounds
        and data.seen is not None
        and federation.clients_per_round > data.seen
    ):
        refuse(
            "federation.clients_per_round",
            f"found {federation.clients_per_round}; allowed: at most {data.seen}, the seen clients "
            f"({data.partition.clients} clients, held_out_fraction {data.held_out_fraction:g})",
        )
    if isinstance(data, OwnData):
        if federation.rounds is None and not algorithm.trains:
            refuse("federation.rounds", f"found null; allowed: 0, because {algorithm.name} has no rounds")
        if federation.min_replies > federation.min_clients:
            allowed = f"at most min_clients, {federation.min_clients}"
            refuse("federation.min_replies", f"found {federation.min_replies}; allowed: {allowed}")
    else:
        if federation.rounds is None:
            refuse("federation.rounds", "found null; allowed: a number; null is for data.own")
        for key in ("until", "min_clients", "heartbeat_timeout_s"):
            if getattr(federation, key) != Federation.model_fields[key].default:
                refuse(f"federation.{key}", "found without data.own; allowed: with it")
    if federation.min_replies > federation.clients_per_round:
        refuse(
            "federation.min_replies",
            f"found {federation.min_replies}; allowed: at most clients_per_round, {federation.clients_per_round}",
        )
    if experiment.evaluation.label_mask and not algorithm.labelled(experiment.algorithm.settings):
        refuse(
            "evaluation.label_mask", f"found true; allowed: false, because {algorithm.name} uses no labels as it is set"
        )
    if experiment.evaluation.own_steps is not None:
        if not isinstance(data, Data) or not data.held_out_fraction:
            found_ = "data.own" if isinstance(data, OwnData) else "held_out_fraction 0"
            allowed = "null, or with a data set of which some clients are unseen"
            refuse("evaluation.own_steps", f"found with {found_}; allowed: {allowed}")
        try:
            algorithm.after_steps(experiment.algorithm.settings, 0)
        except ExperimentError as error:
            refuse("evaluation.own_steps", str(error).partition(": ")[2])
    if isinstance(experiment.model, ModuleSettings) and experiment.model.factory.startswith(MEMORY) and runtime.workers:
        refuse("runtime.workers", f"found {runtime.workers} with a module in memory; allowed: 0, or a model.factory")
    if runtime.device == "cpu" and runtime.clients_at_once > 1:
        refuse("runtime.clients_at_once", f"found {runtime.clients_at_once}; allowed: 1 with device: cpu")
    if isinstance(experiment.model, VGGSettings) and experiment.model.norm == "batch" and runtime.clients_at_once > 1:
        refuse("runtime.clients_at_once", f"found {runtime.clients_at_once}; allowed: 1 with model.norm: batch")
    return found
