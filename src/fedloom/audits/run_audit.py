"""Audit of a finished run: attacks on its models, on the run's own data and in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.attacks.membership import MemberScores, membership_document
from fedloom.core.words import pluralize
from fedloom.data.federated import ClientData, FederatedDataset
from fedloom.data.manifest import read_manifest
from fedloom.engine.assemble import RunContext
from fedloom.engine.trained import personalize_each, restore, torch_threads
from fedloom.errors import DataError, QuorumError, argument
from fedloom.federation.evaluator import Evaluator
from fedloom.models.predictors import Predictor
from fedloom.runs.files import AUDIT, PARTITION, SUMMARY
from fedloom.runs.folder import RunFolder

VERSION = 1
"""Version of ``audit.json``."""

PARTITION_FOLDER, RUN_FOLDER = "partition", "run"
"""Names in the folder of an audit by canaries."""

CONFIDENCE = 0.95
"""Confidence of lower bounds."""

DELTA = 1e-5
"""δ of bounds for a run that claims none."""


def audit_run(run: Path, checkpoint: str = "last", data: Sequence[Path] = ()) -> dict[str, Any]:
    """Attack a run's models, add the results to ``audit.json``, and return its content.

    :func:`fedloom.audit` describes the arguments; ``data`` are folders of packed clients.

    Raise DataError if the folder is not a finished run, or the data of its clients are missing; ExperimentError if the
    run's inputs cannot be reconstructed; QuorumError if no client has a model and both training and test examples.
    """
    folder = RunFolder.open(run)
    if not folder.is_finished:
        raise DataError(
            f"{run} is not finished; an audit needs a run's last model.", hint=f"continue it with {argument('resume')}"
        )
    with torch_threads(1):  # restores the number of threads, which is changed inside
        parts, evaluator, dataset = restore(folder.path, checkpoint, _own_partition(folder), data)
        membership = _membership(parts, evaluator, dataset, claimed_delta(folder))
    return keep_audit(folder, {"membership": membership})


def _own_partition(folder: RunFolder) -> Path | None:
    """Return the partition next to a run with canaries, which is in no data root; None for any other run."""
    partition = folder.path.resolve().parent / PARTITION_FOLDER
    if not (partition / PARTITION).is_file() or read_manifest(partition).fingerprint != folder.manifest().fingerprint:
        return None
    return partition


def keep_audit(folder: RunFolder, results: Mapping[str, Any]) -> dict[str, Any]:
    """Add results to a run's ``audit.json``, replacing earlier ones of the same attacks; return its content."""
    earlier = folder.json_or_none(AUDIT) or {}
    document = {**earlier, "version": VERSION, **results, "claim": claim_of(folder)}
    folder.write_json(AUDIT, document)
    return document


def claim_of(folder: RunFolder) -> dict[str, Any] | None:
    """Return a run's claim about the privacy of its training: ``of``, ``epsilon`` and ``delta``; None without one."""
    claim = folder.json(SUMMARY).get("training_privacy")
    if claim is None or claim["epsilon"] is None:
        return None
    return {"of": claim["unit"], "epsilon": claim["epsilon"], "delta": claim["delta"]}


def claimed_delta(folder: RunFolder) -> float:
    """Return the δ at which a run is audited: its claim's, its experiment's, or :data:`DELTA`."""
    if (claim := claim_of(folder)) is not None:
        return float(claim["delta"])
    privacy = folder.experiment().federation.privacy
    return DELTA if privacy is None else privacy.delta


def _membership(parts: RunContext, evaluator: Evaluator, dataset: FederatedDataset, delta: float) -> dict[str, Any]:
    """Return the results of membership inference for each predictor, on seen and on unseen clients.

    The global model was not trained on unseen clients' examples; their personal models were, if personalization trains.
    """
    client_scores: dict[str, dict[str, MemberScores]] = {name: {} for name in evaluator.predictors}
    size = parts.experiment.evaluation.batch_size

    def attack(client: ClientData, predictors: Mapping[str, Predictor]) -> None:
        different = {id(each): each for each in predictors.values()}  # two names may share one
        scored = {key: MemberScores.from_predictor(each, client, parts.plan, size) for key, each in different.items()}
        for name, each in predictors.items():
            if (scores := scored[id(each)]) is not None:
                client_scores[name][client.id] = scores

    groups = {"seen": dataset.manifest.roster, "unseen": dataset.manifest.unseen}
    failures: dict[str, str] = {}
    for clients in groups.values():
        failures |= personalize_each(parts, evaluator, dataset, clients, attack)
    if not any(client_scores.values()):
        reason = next(iter(failures.values()), "no client has both training and test examples")
        raise QuorumError(f"None of {pluralize(len(dataset.manifest.clients), 'client')} can be audited: {reason}.")

    def document(scores: Mapping[str, MemberScores], clients: Sequence[str]) -> dict[str, Any] | None:
        some = {client: scores[client] for client in clients if client in scores}
        return membership_document(some, delta=delta, confidence=CONFIDENCE, seed=parts.experiment.seed)

    return {
        "round": evaluator.round,
        "delta": delta,
        "confidence": CONFIDENCE,
        "lost": len(failures),
        "predictors": {
            name: {group: document(scores, clients) for group, clients in groups.items()}
            for name, scores in client_scores.items()
        },
    }
