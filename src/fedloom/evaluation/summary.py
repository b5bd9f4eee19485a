"""Computation of ``metrics.jsonl``, ``clients.csv`` and ``summary.json`` from the clients' counts."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedloom.data.manifest import ClientEntry
from fedloom.evaluation.measure import CORRECT, LOSS, READINGS, SPLITS, TOTAL, shapes
from fedloom.evaluation.uncertainty import calibration_errors, calibration_rows, edges, group_uncertainty

Statistics: TypeAlias = dict[str, Any]
"""Statistics of a group of clients: JSON values, see :func:`group_statistics`."""


@dataclass(frozen=True)
class Communication:
    """Bytes of training traffic so far, over all clients.

    ``payload_*`` are tensor bytes as the papers count them, one copy per client; ``wire_*`` are measured on the wire,
    None in process. ``up`` is from the clients to the aggregator.
    """

    payload_up: int
    payload_down: int
    wire_up: int | None = None
    wire_down: int | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Measurements of the clients after a round.

    Attributes
    ----------
    round
        Number of rounds trained before it.
    clients
        n ids, in manifest order.
    seen, present
        ``[n]`` bool: takes part in training; answered this evaluation.
    predictors
        P names, ``personal`` first, and ``global`` if the method has one.
    counts
        ``[n, P, S, R, 3]`` float64, see ``measure``; zero in the rows of absent clients.
    confusion
        ``[n, P, C, C]`` int64, see ``measure``.
    calibration, uncertainty
        ``[n, P, BINS, 3]`` and ``[n, P, 3]`` float64, see ``measure``; zero in the rows of absent clients.
    records
        Values that the server half recorded, one row per client: ``[n, ...]``.
    """

    round: int
    clients: tuple[str, ...]
    seen: Tensor
    present: Tensor
    predictors: tuple[str, ...]
    counts: Tensor
    confusion: Tensor
    calibration: Tensor
    uncertainty: Tensor
    records: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the shapes against each other.

        Raises
        ------
        ValueError
            If they do not agree, or there is no ``personal`` predictor.
        """
        if "personal" not in self.predictors:
            raise ValueError(f"predictors: found {', '.join(self.predictors)}, needed: personal")
        n = len(self.clients)
        measured = shapes(len(self.predictors), self.confusion.shape[-1])
        for name, trailing in {"seen": (), "present": (), **measured}.items():
            found, allowed = tuple(getattr(self, name).shape), (n, *trailing)
            if found != allowed:
                raise ValueError(f"{name} has shape {found}, allowed: {allowed}")
        for name, tensor in self.records.items():
            if tensor.shape[:1] != (n,):
                raise ValueError(f"record {name!r} has shape {tuple(tensor.shape)}, allowed: ({n}, ...)")

    @property
    def classes(self) -> int:
        """Number C of classes; 0 for data without classes."""
        return int(self.confusion.shape[-1])

    def of(self, predictor: str, split: str, reading: str) -> Tensor:
        """Return counts ``[n, 3]`` of one predictor, split and reading; zero for absent clients."""
        p = self.predictors.index(predictor)
        counts = self.counts[:, p, SPLITS.index(split), READINGS.index(reading)]
        return counts * self.present[:, None]


ACCURACIES = ("accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_worst_decile", "accuracy_pooled")
"""Keys of a group's statistics that are None for data without classes."""


def group_statistics(counts: Tensor, *, classes: bool = True) -> Statistics | None:
    """Summarize the clients of a group under one reading.

    Parameters
    ----------
    counts
        ``[m, 3]`` (correct, total, summed loss) per client. Clients with total 0 (absent or untested) are left out;
        ``clients`` is the number of the others.
    classes
        False for data without classes: every accuracy is None.

    Returns
    -------
    dict or None
        ``clients``; ``accuracy_mean`` and ``accuracy_std`` over clients, each counting once (population standard
        deviation, ddof = 0: these are all the clients); ``accuracy_worst``; ``accuracy_worst_decile``, the mean of the
        worst ⌈n/10⌉ clients; ``accuracy_pooled``, correct/total over all examples; ``loss_mean``, the mean over clients
        of their mean loss in nats. Fractions, not percent. None for a group without tested clients.
    """
    counts = counts[counts[:, TOTAL] > 0].double()
    n = len(counts)
    if n == 0:
        return None
    loss = float((counts[:, LOSS] / counts[:, TOTAL]).mean())
    if not classes:
        return {"clients": n} | dict.fromkeys(ACCURACIES) | {"loss_mean": loss}
    accuracy = counts[:, CORRECT] / counts[:, TOTAL]
    worst = accuracy.sort().values[: math.ceil(n / 10)]
    return {
        "clients": n,
        "accuracy_mean": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std(correction=0)),
        "accuracy_worst": float(worst[0]),
        "accuracy_worst_decile": float(worst.mean()),
        "accuracy_pooled": float(counts[:, CORRECT].sum() / counts[:, TOTAL].sum()),
        "loss_mean": loss,
    }


def predictor_statistics(
    evaluation: Evaluation, predictor: str, group: Tensor, *, label_mask: bool
) -> Statistics | None:
    """Return test statistics of one predictor over the clients in ``group`` ``[n]`` bool, in both readings.

    The reading selected by ``label_mask`` is at the top level, as :func:`group_statistics` returns it. The other is
    under ``masked`` or ``unmasked``, None if no client could be measured that way.
    """
    main, other = ("masked", "unmasked") if label_mask else ("unmasked", "masked")
    statistics = group_statistics(evaluation.of(predictor, "test", main)[group], classes=evaluation.classes > 0)
    if statistics is None:
        return None
    return statistics | {other: group_statistics(evaluation.of(predictor, "test", other)[group])}


def groups(evaluation: Evaluation, *, label_mask: bool) -> dict[str, Statistics | None]:
    """Return ``seen`` and ``unseen`` of the personal predictor, and ``global`` of the global one over all clients.

    ``global`` contains ``seen`` and ``unseen`` for the two groups separately; it is None for a method without a global
    predictor. A group without clients is None.
    """
    everyone = torch.ones_like(evaluation.seen)

    def both(predictor: str) -> dict[str, Statistics | None]:
        return {
            "seen": predictor_statistics(evaluation, predictor, evaluation.seen, label_mask=label_mask),
            "unseen": predictor_statistics(evaluation, predictor, ~evaluation.seen, label_mask=label_mask),
        }

    overall = None
    if "global" in evaluation.predictors:
        overall = predictor_statistics(evaluation, "global", everyone, label_mask=label_mask)
        if overall is not None:
            overall |= both("global")
    return both("personal") | {"global": overall}


def uncertainties(evaluation: Evaluation) -> dict[str, dict[str, float] | None]:
    """Return the uncertainty of ``seen``, ``unseen`` (personal) and ``global``: see ``group_uncertainty``."""
    everyone = torch.ones_like(evaluation.seen)
    wanted = {
        "seen": ("personal", evaluation.seen),
        "unseen": ("personal", ~evaluation.seen),
        "global": ("global", everyone),
    }
    return {name: _uncertainty(evaluation, predictor, group) for name, (predictor, group) in wanted.items()}


def calibration_of_clients(evaluation: Evaluation, group: str) -> float | None:
    """Return the mean calibration error over the clients of ``seen``, ``unseen`` or ``global``."""
    errors = calibration_errors(evaluation.calibration[:, evaluation.predictors.index(_predictor_of(group))])
    wanted = {"seen": evaluation.seen, "unseen": ~evaluation.seen}.get(group, torch.ones_like(evaluation.seen))
    errors = errors[wanted & evaluation.present]
    errors = errors[~errors.isnan()]
    return float(errors.mean()) if len(errors) else None


def _predictor_of(group: str) -> str:
    return "global" if group == "global" else "personal"


def _uncertainty(evaluation: Evaluation, predictor: str, group: Tensor) -> dict[str, float] | None:
    """Return the uncertainty of one predictor over the present clients in ``group`` ``[n]`` bool; None without any."""
    if predictor not in evaluation.predictors:
        return None
    p, members = evaluation.predictors.index(predictor), group & evaluation.present
    return group_uncertainty(evaluation.calibration[members, p], evaluation.uncertainty[members, p])


def validation_pooled(evaluation: Evaluation, *, label_mask: bool) -> float | None:
    """Return the pooled validation accuracy of seen clients' personal predictors; None without examples or classes."""
    counts = evaluation.of("personal", "validation", "masked" if label_mask else "unmasked")[evaluation.seen]
    total = float(counts[:, TOTAL].sum())
    return float(counts[:, CORRECT].sum()) / total if total and evaluation.classes else None


def validation_loss(evaluation: Evaluation) -> float | None:
    """Return the mean validation loss of seen clients' personal predictors; None with classes or without examples."""
    counts = evaluation.of("personal", "validation", "unmasked")[evaluation.seen]
    total = float(counts[:, TOTAL].sum())
    return float(counts[:, LOSS].sum()) / total if total and not evaluation.classes else None


def validation_score(evaluation: Evaluation, *, label_mask: bool) -> float | None:
    """Return the score that the best round maximizes: pooled validation accuracy, or -loss without classes."""
    loss = validation_loss(evaluation)
    return validation_pooled(evaluation, label_mask=label_mask) if loss is None else -loss


def left_out(evaluation: Evaluation, *, label_mask: bool) -> dict[str, int]:
    """Return the numbers of clients left out of statistics: ``absent`` (no answer), ``untested`` (no test data)."""
    total = evaluation.of("personal", "test", "masked" if label_mask else "unmasked")[:, TOTAL]
    present = evaluation.present.bool()
    return {"absent": int((~present).sum()), "untested": int((present & (total == 0)).sum())}


def metrics_line(
    evaluation: Evaluation,
    *,
    label_mask: bool,
    train_loss: float | None,
    communication: Communication,
    client_steps: int,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the object of one evaluated round in ``metrics.jsonl``.

    Parameters
    ----------
    train_loss
        Mean training loss since the previous line; None at round 0.
    communication, client_steps
        Cumulative over training.
    extra
        Sub-objects of methods, by the method's name.

    Raises
    ------
    ValueError
        If ``extra`` uses a key of the line itself.
    """
    line = {
        "round": evaluation.round,
        **groups(evaluation, label_mask=label_mask),
        "uncertainty": uncertainties(evaluation),
        "validation_pooled": validation_pooled(evaluation, label_mask=label_mask),
        "validation_loss": validation_loss(evaluation),
        "left_out": left_out(evaluation, label_mask=label_mask),
        "train": {"loss": train_loss},
        "communication": asdict(communication),
        "client_steps": client_steps,
    }
    return _extended(line, extra)


def best(history: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return ``best`` of ``summary.json``: the line with the best validation score, the earliest on ties.

    The score is the highest pooled validation accuracy, or, for data without classes, the lowest validation loss.

    Parameters
    ----------
    history
        Lines of ``metrics.jsonl``, in any order.

    Returns
    -------
    dict or None
        ``round``, ``seen``, ``unseen``, ``global``; None if no round was validated.
    """
    scored = ((score, line) for line in history if (score := line_score(line)) is not None)
    _, chosen = min(scored, key=lambda pair: (-pair[0], pair[1]["round"]), default=(None, None))
    if chosen is None:
        return None
    return {key: chosen[key] for key in ("round", "seen", "unseen", "global")}


LATE = 8
"""Number of evaluations at the end of training that are summarized together."""


def late(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return ``last_evaluations`` of ``summary.json``: statistics of the evaluations at the end of training.

    A single evaluation, and even more the highest of several, is unreliable if accuracy fluctuates between evaluations.

    Parameters
    ----------
    lines
        Up to :data:`LATE` last lines of ``metrics.jsonl``, ascending. Lines before training are left out unless there
        are no others.

    Returns
    -------
    dict or None
        ``evaluations``, their number; ``rounds``, the first and the last; and for ``seen``, ``unseen`` and ``global``,
        by ``accuracy_mean`` and ``accuracy_pooled`` (without classes ``loss_mean``), {``mean``, ``lowest``,
        ``highest``}; None for a group that some line lacks. None without lines.
    """
    lines = [line for line in lines if line["round"]] or list(lines)
    if not lines:
        return None
    found: dict[str, Any] = {"evaluations": len(lines), "rounds": [lines[0]["round"], lines[-1]["round"]]}
    for group in ("seen", "unseen", "global"):
        of_group = [line[group] for line in lines if line[group] is not None]
        found[group] = {} if len(of_group) == len(lines) else None
        for key in ("accuracy_mean", "accuracy_pooled", "loss_mean") if found[group] is not None else ():
            values = [one[key] for one in of_group if one.get(key) is not None]
            if len(values) == len(lines) and (key != "loss_mean" or not found[group]):
                mean = math.fsum(values) / len(values)
                found[group][key] = {"mean": mean, "lowest": min(values), "highest": max(values)}
    return found


def own_steps(after: Mapping[int, Evaluation], *, label_mask: bool) -> list[dict[str, Any]] | None:
    """Return ``own_steps`` of ``summary.json``: {``steps``, ``unseen``} for each number of a client's own steps.

    ``unseen`` is as in the summary itself. The list is None if no steps were requested.
    """
    found = [
        {"steps": k, "unseen": predictor_statistics(e, "personal", ~e.seen, label_mask=label_mask)}
        for k, e in after.items()
    ]
    return found or None


def line_score(line: Mapping[str, Any]) -> float | None:
    """Return :func:`validation_score` from a line of ``metrics.jsonl``."""
    loss = line.get("validation_loss")
    accuracy: float | None = line["validation_pooled"]
    return accuracy if loss is None else -float(loss)


def summary(
    final: Evaluation,
    history: Iterable[Mapping[str, Any]],
    *,
    last: Sequence[Mapping[str, Any]] = (),
    label_mask: bool,
    name: str,
    algorithm: str,
    dataset: str,
    model: str,
    seed: int,
    rounds: int,
    clients_per_round: int | None,
    communication: Communication,
    duration_s: float,
    client_steps: int,
    training_s: float,
    titles: Mapping[str, str] | None = None,
    after_steps: Mapping[int, Evaluation] | None = None,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the object of ``summary.json``: the keys of DESIGN §7, and ``uncertainty``.

    Parameters
    ----------
    final
        Evaluation of the last round.
    history
        Lines of ``metrics.jsonl``, including that of the best round.
    last
        Last :data:`LATE` lines of it.
    rounds
        Number of rounds trained.
    client_steps, training_s
        Local SGD steps, and wall time of the training rounds that made them, including aggregation and wire, excluding
        evaluation and start-up. Their ratio is None for a method without rounds.
    after_steps
        Number of own steps -> evaluation of the unseen clients after them.
    extra
        Sub-objects of methods, by the method's name. ``extra[algorithm]["new_client"]`` gives, by predictor, a new
        client's cost for ``fedloom compare``: ``client_steps``, ``payload_up``, ``payload_down``.

    Raises
    ------
    ValueError
        If ``extra`` uses a key of the summary itself.
    """
    result = {
        "name": name,
        "algorithm": algorithm,
        "titles": dict(titles or {}),
        "dataset": dataset,
        "model": model,
        "seed": seed,
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        **groups(final, label_mask=label_mask),
        "own_steps": own_steps(after_steps or {}, label_mask=label_mask),
        "best": best(history),
        "last_evaluations": late(last),
        "uncertainty": {
            name: None if found is None else {**found, "ece_clients": calibration_of_clients(final, name)}
            for name, found in uncertainties(final).items()
        },
        "communication": asdict(communication),
        "duration_s": duration_s,
        "client_steps_per_s": client_steps / training_s if client_steps and training_s > 0 else None,
    }
    return _extended(result, extra)


def client_rows(evaluation: Evaluation, entries: Iterable[ClientEntry]) -> list[dict[str, str]]:
    """Return the lines of ``clients.csv``, in the order of the evaluation.

    Columns: ``id``, ``seen`` (true, false), ``train``, ``validation``, ``test`` (examples), ``labels`` (classes of the
    train split, separated by spaces), then for each predictor ``<p>_accuracy_unmasked``, ``<p>_loss_unmasked``,
    ``<p>_accuracy_masked``, ``<p>_loss_masked`` on the test split, empty without such a reading; ``<p>_ece``, its own
    calibration error there (unmasked); and ``owner``, the name of its natural owner, empty for partitioned examples.
    """
    by_id = {entry.id: entry for entry in entries}
    calibrations = evaluation.calibration.unbind(1)
    errors = {p: calibration_errors(c).tolist() for p, c in zip(evaluation.predictors, calibrations, strict=True)}
    rows = []
    for i, client in enumerate(evaluation.clients):
        entry = by_id[client]
        row = {
            "id": client,
            "seen": str(entry.seen).lower(),
            "train": str(entry.train),
            "validation": str(entry.validation),
            "test": str(entry.test),
            "labels": " ".join(str(label) for label, count in enumerate(entry.class_counts["train"]) if count),
        }
        for predictor in evaluation.predictors:
            for reading in READINGS:
                correct, total, loss = evaluation.of(predictor, "test", reading)[i].tolist()
                row[f"{predictor}_accuracy_{reading}"] = (
                    f"{correct / total:.6f}" if total and evaluation.classes else ""
                )
                row[f"{predictor}_loss_{reading}"] = f"{loss / total:.6f}" if total else ""
            error = errors[predictor][i]
            row[f"{predictor}_ece"] = "" if math.isnan(error) else f"{error:.6f}"
        rows.append({**row, "owner": entry.owner or ""})
    return rows


def confusion_document(evaluation: Evaluation, class_names: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``confusion.json``: predicted against true classes on the test split, unmasked.

    ``round``, ``classes``, and for each predictor (None if the method lacks it) ``seen`` and ``unseen``: sums over the
    group's clients, a row per class and a column per predicted class, None for a group without clients.
    """
    document: dict[str, Any] = {
        "round": evaluation.round,
        "classes": list(class_names),
        "personal": None,
        "global": None,
    }
    for p, predictor in enumerate(evaluation.predictors):
        document[predictor] = {}
        for name, group in (("seen", evaluation.seen), ("unseen", ~evaluation.seen)):
            members = evaluation.confusion[group & evaluation.present, p]
            document[predictor][name] = members.sum(0).tolist() if len(members) else None
    return document


def confusion_table(evaluation: Evaluation) -> str:
    """Return the content of ``confusion.csv``: each personal model's predicted and true classes, test split, unmasked.

    It has a line ``id,class,predicted,examples`` for each pair of classes that occurs, in the order of the evaluation,
    with classes by number. Clients that did not answer, or have no labelled test examples, have no lines.
    """
    text, p = io.StringIO(), evaluation.predictors.index("personal")
    text.write("id,class,predicted,examples\n")
    for client, found, present in zip(evaluation.clients, evaluation.confusion[:, p], evaluation.present, strict=True):
        if present:
            places = found.nonzero()
            for (j, k), n in zip(places.tolist(), found[places.unbind(1)].tolist(), strict=True):
                text.write(f"{client},{j},{k},{n}\n")
    return text.getvalue()


def calibration_document(evaluation: Evaluation) -> dict[str, Any]:
    """Return the content of ``calibration.json``: accuracy by confidence on the test split, unmasked.

    ``round``; ``edges``, the bin edges; and for each predictor (None if the method lacks it) ``seen`` and ``unseen``:
    for each bin the number of examples of the group, their mean confidence and their accuracy. None for a group without
    examples.
    """
    document: dict[str, Any] = {"round": evaluation.round, "edges": edges(), "personal": None, "global": None}
    for p, predictor in enumerate(evaluation.predictors):
        document[predictor] = {
            name: calibration_rows(evaluation.calibration[group & evaluation.present, p])
            for name, group in (("seen", evaluation.seen), ("unseen", ~evaluation.seen))
        }
    return document


def _extended(line: dict[str, Any], extra: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Add the methods' sub-objects."""
    extra = extra or {}
    taken = sorted(set(extra) & set(line))
    if taken:
        raise ValueError(f"a method may not be called {taken[0]!r}: that key is taken")
    return line | {method: dict(values) for method, values in extra.items()}
