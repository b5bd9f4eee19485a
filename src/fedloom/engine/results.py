"""Results of a run, written to its folder at each evaluation and at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.algorithms.sums import STATISTICS, learned_fields
from fedloom.core.digests import RESTORE
from fedloom.core.words import as_csv, pluralize
from fedloom.data.manifest import Manifest
from fedloom.engine.training_privacy import is_simulation
from fedloom.errors import GO_ON, DataError, QuorumError
from fedloom.evaluation.descriptors import descriptor_correlation, descriptor_document
from fedloom.evaluation.documents import (
    calibration_document,
    client_rows,
    confusion_document,
    confusion_table,
    output_document,
)
from fedloom.evaluation.group_statistics import predictor_statistics
from fedloom.evaluation.plan import EvaluationResult
from fedloom.evaluation.summary import LATE, Communication, RunCost, RunDescription, metrics_line, summary
from fedloom.evaluation.uncertainty import INFORMATION, client_document
from fedloom.experiment import Experiment
from fedloom.federation.evaluator import Extra
from fedloom.federation.loop import Loop
from fedloom.federation.releases import count_releases, count_releases_about
from fedloom.federation.roster import Roster
from fedloom.messages import Metrics, Quantity, answer_shapes
from fedloom.privacy.claim import claim
from fedloom.privacy.gaussian_mechanism import compose, gaussian_epsilon
from fedloom.runs.files import METRICS
from fedloom.runs.folder import RunFolder

if TYPE_CHECKING:
    from fedloom.engine.assemble import RunContext


def extra_metrics(e: Experiment, roster: Roster, folder: RunFolder, *, keep: bool) -> Extra:
    """Return a function that adds a method's own records to a line of ``metrics.jsonl``.

    The ``roster`` has the class proportions of the evaluated clients. With ``keep``, the function also writes
    ``descriptors.json`` and ``uncertainty.json``.
    """
    mask = e.evaluation.label_mask

    def extra(evaluation: EvaluationResult) -> dict[str, dict[str, Any]]:
        if keep and evaluation.moments is None:  # the evaluation has the values of each client
            _keep_uncertainty(folder, evaluation)
        if "user" in evaluation.records:
            users = evaluation.records["user"][:, 0] > 0
            return {e.algorithm.name: {"users": predictor_statistics(evaluation, "personal", users, label_mask=mask)}}
        if (
            "descriptor" not in evaluation.records or not roster.manifest.spec.classes
        ):  # they are compared with class mixes
            return {}
        v, pi = evaluation.records["descriptor"], roster.manifest.class_proportions(evaluation.clients)
        correlation = descriptor_correlation(v, pi, ~evaluation.seen, evaluation.present)
        if keep:
            document = descriptor_document(
                _earlier(folder, "descriptors.json", evaluation.clients),
                evaluation.round,
                correlation,
                v=v,
                pi=pi,
                clients=evaluation.clients,
                seen=evaluation.seen,
                present=evaluation.present,
            )
            folder.write_json("descriptors.json", document)
        return {e.algorithm.name: {"spearman": correlation.as_json()}}

    return extra


def _earlier(folder: RunFolder, name: str, clients: Sequence[str]) -> dict[str, Any] | None:
    """Return the content of a run's file, to be extended; None if it is absent or about other clients.

    Raise DataError if it is damaged.
    """
    document = folder.json_or_none(name)
    return document if document is not None and document["clients"]["ids"] == list(clients) else None


def _keep_uncertainty(folder: RunFolder, evaluation: EvaluationResult) -> None:
    """Add a round to ``uncertainty.json`` if the personal predictors are distributions over networks."""
    p = evaluation.predictors.index("personal")
    uncertainty = evaluation.uncertainty[:, p]
    if not bool(uncertainty[:, INFORMATION].any()):
        return
    document = client_document(
        _earlier(folder, "uncertainty.json", evaluation.clients),
        evaluation.round,
        clients=evaluation.clients,
        seen=evaluation.seen,
        calibration=evaluation.calibration[:, p],
        uncertainty=uncertainty,
    )
    folder.write_json("uncertainty.json", document)


def conclude(parts: RunContext, run: Loop, final: EvaluationResult, duration_s: float) -> dict[str, Any]:
    """Write ``clients.csv``, ``summary.json`` and the other final results; return the summary.

    Raise QuorumError if the last evaluation asked clients and none of them could be measured, so that there are no
    results.
    """
    if final.asked and not final.measured:
        client, reason = next(iter(run.unmeasured.items()), (final.clients[0], "no answer"))
        everyone = pluralize(final.asked, "client")
        raise QuorumError(
            f"None of {everyone} could be measured after round {run.round}. Client {client}: {reason}",
            hint=GO_ON,
        )
    e = parts.experiment
    folder = run.folder
    last, _ = folder.last_evaluation(run.round) or ({}, 0)
    best = None if run.best is None else folder.evaluation_of(run.best.round)
    if run.best is not None and best is None:
        raise DataError(f"{folder.path / METRICS} is damaged: it lacks the best round, {run.best.round}", hint=RESTORE)
    extra = {e.algorithm.name: {**last.get(e.algorithm.name, {}), "new_client": _new_client(parts, run)}}
    extra[e.algorithm.name] |= _privacy(parts, run)
    folder.write("clients.csv", as_csv(client_rows(final, run.manifest.clients)))
    write_task_results(folder, final, parts.manifest.spec.class_names)
    titles = parts.algorithm.titles(parts.settings)
    description = RunDescription(e.name, e.algorithm.name, e.data.dataset, e.model.name, e.seed, titles)
    cost = RunCost(
        run.round,
        e.federation.clients_per_round if parts.algorithm.trains else None,
        run.communication(),
        duration_s,
        run.client_steps(),
        run.training_seconds(),
    )
    result = summary(
        final,
        [] if best is None else [best],
        description,
        cost,
        label_mask=e.evaluation.label_mask,
        last=folder.last_evaluations(LATE, run.round),
        after_steps=run.after_steps,
        extra=extra,
    )
    result |= training_claim(parts, run)
    folder.close_lines()
    folder.write_json("summary.json", result)
    return result


def write_evaluation(
    folder: RunFolder, evaluation: EvaluationResult, manifest: Manifest, spent: dict[str, Any], *, label_mask: bool
) -> None:
    """Write an evaluation of a run's model on other clients to a copy of its folder.

    ``spent`` is the line of ``metrics.jsonl`` up to which the model was trained.
    """
    line = metrics_line(
        evaluation,
        label_mask=label_mask,
        train_loss=spent["train"]["loss"],
        communication=Communication(**spent["communication"]),
        client_steps=spent["client_steps"],
    )
    folder.reopen_lines()
    folder.rewrite(METRICS, [line])
    folder.write("partition.json", manifest.to_json())
    folder.write("clients.csv", as_csv(client_rows(evaluation, manifest.clients)))
    write_task_results(folder, evaluation, manifest.spec.class_names)


def write_task_results(folder: RunFolder, evaluation: EvaluationResult, class_names: Sequence[str]) -> None:
    """Write the results that only some tasks have.

    They are ``confusion.json``, ``confusion.csv`` and ``calibration.json`` of classification, and ``outputs.json`` of
    multilabel and segmentation.
    """
    if evaluation.classes:
        folder.write_json("confusion.json", confusion_document(evaluation, class_names))
        folder.write("confusion.csv", confusion_table(evaluation))
        folder.write_json("calibration.json", calibration_document(evaluation))
    if (of_outputs := output_document(evaluation)) is not None:
        folder.write_json("outputs.json", of_outputs)


def training_claim(parts: RunContext, run: Loop) -> dict[str, Any]:
    """Return ``training_privacy`` and ``ended_by`` of ``summary.json``; nothing without ``federation.privacy``."""
    federation = parts.experiment.federation
    if (privacy := federation.privacy) is None:
        return {}
    simulated = is_simulation(parts.experiment, run.transport)
    counts = count_releases_about(run.folder, privacy.of, repeatable=simulated)
    protected, others = _fields_of_training(parts, run)
    if privacy.of == "examples":  # losses, which would disclose examples, are sent as 0
        messages = parts.algorithm.messages
        losses = {f"{cls.__name__}.{f.name}" for cls in messages for f in cls.fields() if f.quantity == Quantity.LOSS}
        others = [name for name in others if name not in losses]
    statement = claim(
        privacy,
        counts.counts,
        simulated=simulated,
        secure=federation.secure_aggregation is not None,
        cohorts=counts.cohorts,
        covers=protected,
        does_not_cover=others,
        unknown=None if counts.is_known else "some rounds had no noise, or were not counted",
    )
    return {"training_privacy": statement.as_json(), "ended_by": run.ended_by or "rounds"}


def _fields_of_training(parts: RunContext, run: Loop) -> tuple[list[str], list[str]]:
    """Return the fields of clients' answers that carry learned values, and those that carry statistics, by message."""
    sums = parts.algorithm.sums(parts.settings)
    shapes = answer_shapes(parts.algorithm.messages, run.server.sizes)
    questions = sums if parts.summation is not None else shapes
    names = {True: list[str](), False: list[str]()}
    for cls in questions:
        fields = learned_fields(cls, sums.get(cls, {}))
        for field in cls.fields():
            if field.name in questions[cls]:
                is_learned = field.name in fields or field.quantity not in STATISTICS
                names[is_learned].append(f"{cls.__name__}.{field.name}")
    return names[True], names[False]


def _privacy(parts: RunContext, run: Loop) -> dict[str, Any]:
    """Return the privacy of the clients' messages: for the client that released most, and for a new one.

    Requested answers count, including those of clients that have left (:mod:`fedloom.federation.releases`). ``noise``
    names the noise's source: the run's ``seed`` in a simulation, or a ``secret`` of each worker.
    """
    promised = parts.algorithm.privacy(parts.settings)
    if promised is None:
        return {}
    simulated = is_simulation(parts.experiment, run.transport)
    counts = count_releases(run.folder, repeatable=simulated)
    least = min(map(_multiplier, counts.times.values()), default=math.inf) if counts.is_known else 0.0
    answers = [cls.__name__ for cls in answer_shapes(parts.algorithm.messages, run.server.sizes)]

    def epsilon(multiplier: float) -> float | None:
        spent = gaussian_epsilon(multiplier, promised.delta)
        return None if math.isinf(spent) else spent

    description = {
        "mechanism": "gaussian",
        "neighbours": "replace one",
        "covers": list(promised.covers),
        "does_not_cover": [name for name in [*answers, Metrics.__name__] if name not in promised.covers],
        "clip": promised.clip,
        "noise_multiplier": promised.noise_multiplier,
        "delta": promised.delta,
        "releases_most": max((sum(times.values()) for times in counts.times.values()), default=0),
        "epsilon_most": epsilon(least),
        "epsilon_new_client": epsilon(promised.noise_multiplier),
        "noise": "seed" if simulated else "secret",
    }
    return {"privacy": description}


def _multiplier(times: Mapping[float, int]) -> float:
    """Return the noise multiplier of one answer that releases as much as all these compose.

    ``times`` maps noise multipliers to numbers of answers.
    """
    if not all(times):
        return 0.0
    each = [z / math.sqrt(count) for z, count in times.items()]
    return each[0] if len(each) == 1 else compose(each)


def _new_client(parts: RunContext, run: Loop) -> dict[str, Any]:
    """Return a new client's cost for each predictor: SGD steps (mean over clients) and tensor bytes."""
    algorithm = parts.client_algorithm()
    entries = run.manifest.clients
    return {
        name: {
            "client_steps": sum(algorithm.personalization_steps(name, entry.train) for entry in entries) / len(entries),
            "payload_up": run.personalization_payload[0],
            "payload_down": run.personalization_payload[1],
        }
        for name in algorithm.predictors
    }
