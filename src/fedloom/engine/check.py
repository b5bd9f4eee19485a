"""Check of an experiment before its run: everything that the run would refuse, and facts about it, without training."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fedloom.algorithms.catalogue import model_needs
from fedloom.core.processes import usable_cores
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import SPLITS, VERSION, ClientEntry, Manifest
from fedloom.data.own import own_manifest
from fedloom.data.partition import made_partition
from fedloom.data.spec import Normalization
from fedloom.engine.assemble import RunContext, make_parts, use_device
from fedloom.engine.disclosure import DisclosedTensor, of_experiment
from fedloom.engine.engine import Engine, run_folder, trackers_of
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.engine.rehearsal import MeasuredCosts, RoundCost, rehearse
from fedloom.engine.resume import check_folder
from fedloom.engine.run_data import run_dataset
from fedloom.engine.training_privacy import Planned, Population, with_noise
from fedloom.errors import FedloomError, QuorumError
from fedloom.experiment import Experiment, OwnData

SPREAD = (0.8, 1.5)
"""Factors on the estimated time that give its range."""

Facts = dict[str, Any]


def check_experiment(experiment: Experiment, options: RunOptions) -> Facts:
    """Return the facts about an experiment that a run would accept (docs/experiment.md); raise the run's error."""
    place = _partition_place(experiment, options)
    if place == "not given":
        for check in _checks(experiment, options, place):
            check()
        e = _with_known_noise(experiment)
        return _facts(make_parts(e, _planned_manifest(e)), options, None, place)
    engine = Engine(experiment, options, RunObserver())
    assert engine.dataset is not None  # only aggregators have none
    return _facts(engine.parts, options, engine.dataset, place)


def other_errors(experiment: Experiment, options: RunOptions, first: FedloomError) -> list[FedloomError]:
    """Return the errors beside the run's ``first`` one, of parts that can be checked without each other."""
    found = {str(first): first}
    for check in _checks(experiment, options, _partition_place(experiment, options)):
        try:
            check()
        except FedloomError as error:
            found.setdefault(str(error), error)
    return list(found.values())[1:]


def _checks(e: Experiment, options: RunOptions, place: str) -> list[Callable[[], object]]:
    """Return the checks of an engine that do not depend on each other, in its order."""
    return [
        partial(trackers_of, e),
        partial(check_folder, run_folder(e, options), e, options.resume),
        partial(use_device, e.runtime.device, e.runtime.threads),
        *([] if place == "not given" else [partial(run_dataset, e, options)]),
        partial(_with_known_noise, e),
        lambda: make_parts(e, _planned_manifest(e)),
    ]


def _partition_place(e: Experiment, options: RunOptions) -> str:
    """Return where the partition comes from; members' folders may be missing."""
    if options.packed or options.observe:
        return "own"
    if options.partition is not None:
        return options.partition
    if isinstance(e.data, OwnData):
        return "not given"
    try:
        made = made_partition(e.data.opened(), e.data.partition_settings(e.seed), e.data.root)
    except FedloomError:  # the run's own check reports it
        made = None
    return "created" if made is None else str(made)


def _planned_manifest(e: Experiment) -> Manifest:
    """Return a manifest with as many clients as the experiment states, without examples."""
    if isinstance(e.data, OwnData):
        return own_manifest(e.data.own, (), e.seed, Normalization.identity(e.data.own.spec.numbers))
    data, spec = e.data, e.data.partition.drawn_spec(e.data.opened().spec)
    counts = dict.fromkeys(SPLITS, (0,) * spec.classes)
    clients, seen = data.partition.clients or 0, data.seen or 0
    return Manifest(
        version=VERSION,
        dataset=data.dataset,
        spec=spec,
        scheme={},
        seed=e.seed,
        held_out_fraction=data.held_out_fraction,
        validation_fraction=data.validation_fraction,
        source_sha256={},
        clients=tuple(ClientEntry(f"client-{i}", i < seen, 0, 0, 0, counts, "0" * 64) for i in range(clients)),
    )


def _with_known_noise(e: Experiment) -> Experiment:
    """Return the experiment with the noise that its ε needs, if that does not depend on the clients' data."""
    privacy = e.federation.privacy
    known = privacy is not None and privacy.of == "clients" and Population.from_experiment(e, None) is not None
    return with_noise(e, None) if known else e


def _facts(parts: RunContext, options: RunOptions, dataset: FederatedDataset | None, place: str) -> Facts:
    e, manifest, model = parts.experiment, parts.manifest, parts.setup.model
    answers, measures = of_experiment(e, parts)
    federation, rounds, evaluations = e.federation, e.federation.rounds, None
    if rounds is not None:  # before training, after every so many rounds, and at the end
        evaluations = 1 + rounds // e.evaluation.every + bool(rounds % e.evaluation.every)
    layout, is_given = model.layout, place != "not given"
    buffers = sum(size for (name, _), size in zip(layout.entries, layout.sizes, strict=True) if name in layout.buffers)
    costs, failure = (None, None) if dataset is None else _costs(parts, dataset)
    sizes = [] if dataset is None else sorted(entry.train for entry in manifest.clients)
    examples = {"median": statistics.median(sizes), "smallest": sizes[0], "largest": sizes[-1]} if sizes else None
    return {
        "valid": True,
        "name": e.name,
        "folder": str(run_folder(e, options).path),
        "data": {
            "dataset": manifest.dataset,
            "partition": place,
            "seen": len(manifest.roster) if is_given else None,
            "unseen": len(manifest.unseen) if is_given else None,
            "train_examples": examples,
            "classes": manifest.spec.classes,
        },
        "model": {
            "name": e.model.name,
            "parameters": layout.size - buffers,
            "frozen": sum(tensor.numel() for tensor in model.constants.values()),
            "bytes": layout.size * parts.setup.dtype.itemsize,
        },
        "method": {
            "name": e.algorithm.name,
            "needs": list(model_needs(parts.algorithm)),
            "keeps_states": parts.client_algorithm().stateful,
        },
        "disclosure": {
            "only_sums": federation.secure_aggregation is not None,
            "training": _by_quantity(answers) if rounds != 0 else {},
            "evaluation": _by_quantity(measures),
        },
        "rounds": rounds,
        "clients_per_round": federation.clients_per_round if rounds != 0 else 0,
        "evaluations": evaluations,
        "communication": None if costs is None or not costs.rounds else _communication(rounds, costs.rounds),
        "privacy": _privacy(e, None if dataset is None else manifest),
        "estimate": None if costs is None else _estimate(e, manifest, costs, evaluations),
        "failure": failure,
    }


def _costs(parts: RunContext, dataset: FederatedDataset) -> tuple[MeasuredCosts | None, str | None]:
    """Return the costs of a run, or the reason why its first round fails; nothing is logged meanwhile."""
    log = logging.getLogger("fedloom")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return rehearse(parts, dataset), None
    except QuorumError as error:
        return None, error.message
    finally:
        log.setLevel(level)


def _by_quantity(tensors: Sequence[DisclosedTensor]) -> dict[str, int]:
    counts = Counter[str]()
    for tensor in tensors:
        counts[tensor.quantity.replace("_", " ")] += tensor.numbers or 0
    return dict(counts)


def _communication(rounds: int | None, measured: Sequence[RoundCost]) -> Facts:
    """Return bytes of a client and of all clients in a round, and in all, up (to the aggregator) and down."""
    facts = Facts()
    for way in ("payload_up", "payload_down"):
        first, later = getattr(measured[0], way), getattr(measured[-1], way)
        total = None if rounds is None else first + (rounds - 1) * later
        facts[way] = {"client_round": round(later / max(measured[-1].clients, 1)), "round": later, "total": total}
    return facts


def _privacy(e: Experiment, manifest: Manifest | None) -> Facts | None:
    """Return the ε of all rounds toward readers of the models; None where it is not known before the run."""
    privacy, rounds = e.federation.privacy, e.federation.rounds
    if privacy is None or rounds == 0:
        return None
    population, z, epsilon = Population.from_experiment(e, manifest), privacy.noise_multiplier, None
    if population is not None and rounds is not None and z is not None:
        is_known = privacy.of == "clients" or population.examples is not None
        epsilon = Planned(e, population).epsilon(rounds, z) if is_known else None
    facts = {key: getattr(privacy, key) for key in ("of", "delta", "noise_multiplier", "budget")}
    return {**facts, "epsilon": epsilon}


def _estimate(e: Experiment, manifest: Manifest, costs: MeasuredCosts, evaluations: int | None) -> Facts:
    workers, clients = e.runtime.workers, manifest.clients
    at_once = max(1, min(workers, usable_cores() // e.runtime.threads))
    each = [cost.server_s + cost.client_s * cost.clients / min(at_once, cost.clients or 1) for cost in costs.rounds]
    evaluation = costs.evaluation_s * len(clients) / min(at_once, len(clients))
    seconds = None
    if e.federation.rounds is not None and evaluations is not None:
        own_steps = len(e.evaluation.own_steps or ()) * len(manifest.unseen) / len(clients)
        rounds = each[0] + (e.federation.rounds - 1) * each[-1] if each else 0
        seconds = [factor * ((evaluations + own_steps) * evaluation + rounds) for factor in SPREAD]
    return {
        "seconds": seconds,
        "round_seconds": each[-1] if each else None,
        "evaluation_seconds": evaluation,
        "workers": workers,
        "at_once": at_once,
        "processes": workers + 1,
        "process_bytes": costs.memory,
        "device_bytes": costs.device_memory,
        "leaves_out": ["start of the processes", "transfer between them", "checkpoints", "report"],
    }
