"""Sections of a report on calibration, and on clients whose models are distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedloom.errors import DataError
from fedloom.reporting.drawing import COLOURS, FULL, HALF, INK, OTHER, as_svg, dots, percent, sheet
from fedloom.reporting.page import DASH, Panel, Part
from fedloom.reporting.report_results import NAMED, client_row, last_line, small_table
from fedloom.reporting.report_setup import summary_of
from fedloom.reporting.tables import table_row
from fedloom.reporting.words import GROUP_TITLES, in_percent
from fedloom.runs.folder import RunFolder

PICTURED = 5
"""Number of clients shown individually, as in papers/003, Figure 3."""


def _clients_by_id(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return the rows of ``clients.csv`` by id; empty if it cannot be read."""
    try:
        return {row["id"]: row for row in run.clients()}
    except DataError:
        return {}


def calibration(run: RunFolder) -> Part:
    """Return the reliability diagram, calibration errors and uncertainties."""
    panel = Panel("reliability", draw_reliability(run.json("calibration.json")))
    of_clients = {key: of.get("ece_clients") for key, of in summary_of(run).get("uncertainty", {}).items() if of}
    rows = []
    for key, label in GROUP_TITLES.items():
        found = last_line(run).get("uncertainty", {}).get(key)
        if found is not None:
            own = DASH if of_clients.get(key) is None else in_percent(of_clients[key])
            nats = (f"{found[name]:.3f}" for name in ("entropy", "mutual_information"))
            rows.append(table_row(label, in_percent(found["ece"]), own, *nats, colour=key))
    headings = ("", "calibration error, %", "mean over clients, %", "entropy, nats", "mutual information, nats")
    text = (
        "Test split, unmasked. Predictions are sorted into bins by confidence, the highest predicted probability. The "
        "accuracy of a calibrated model equals its confidence (the diagonal). Calibration error: expected calibration "
        "error (ECE), the mean distance from the diagonal weighted by examples, over all examples together. Its mean "
        "over clients is higher, because an overconfident client does not offset a cautious one, and because of chance "
        "where examples are few. Entropy is that of the prediction. Mutual information of prediction and model is zero "
        "for a client with a single model rather than a distribution of models."
    )
    table = small_table("Calibration error and uncertainty", headings, rows)
    return Part(panels=(panel,), tables=(table,), columns=2, text=text)


def uncertainty(run: RunFolder) -> Part:
    """Return confidence, entropy and mutual information of clients whose models are distributions."""
    document = run.json("uncertainty.json")
    ids, seen, last = document["clients"]["ids"], document["clients"]["seen"], document["rounds"][-1]
    if all(value is None for value in last["entropy"]):
        raise DataError(f"{run.path / 'uncertainty.json'}: no client answered in round {last['round']}")
    panels = (
        Panel("uncertainty-training", draw_confidence_over_training(document), wide=True),
        Panel("uncertainty-clients", draw_accuracy_by_uncertainty(document)),
    )
    by_id = _clients_by_id(run)
    most = sorted((-entropy, i) for i, entropy in enumerate(last["entropy"]) if entropy is not None)[:NAMED]
    rows = []
    for _, i in most:
        right = in_percent(sum(last["right"][i]) / sum(last["examples"][i]))
        nats = (f"{last[name][i]:.3f}" for name in ("entropy", "mutual_information"))
        rows.append(client_row(by_id.get(ids[i], {"id": ids[i], "seen": str(seen[i]).lower()}), right, *nats))
    headings = ("client", "accuracy, %", "entropy, nats", "mutual information, nats")
    text = (
        "Personalized model, test split, unmasked. Bars: share of a client's examples by confidence, with correct "
        "predictions in colour and wrong ones grey, after the first two evaluated rounds and the last. The clients are "
        "those at the minimum, the quartiles and the maximum of entropy after the last round. H and I: mean entropy of "
        "the prediction, and mean mutual information of prediction and model, in nats."
    )
    return Part(
        panels=panels, tables=(small_table("Clients of highest entropy", headings, rows),), columns=2, text=text
    )


@as_svg
def draw_reliability(document: Mapping[str, Any]) -> Figure:
    """Draw accuracy over confidence by bin, with the share of examples in each bin below.

    A calibrated predictor lies on the diagonal; an overconfident one lies below it.
    """
    figure = sheet(HALF, 4.1)
    upper, lower = figure.subplots(2, 1, height_ratios=[5, 2])
    upper.plot([0, 1], [0, 1], color=INK, alpha=0.35, linewidth=0.8, linestyle=":")
    for name, rows in _groups(document).items():
        examples, confidence, accuracy = np.asarray(rows, dtype=np.float64).T
        filled, dash, colour = examples > 0, "--" if name == "global" else "-", COLOURS[name]
        line = {"color": colour, "marker": "o", "markersize": 3, "label": GROUP_TITLES[name]}
        upper.plot(confidence[filled], accuracy[filled], dash, **line)
        lower.stairs(examples / examples.sum(), document["edges"], color=colour, linestyle=dash, linewidth=1.2)
    upper.set(title="Reliability diagram", xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    lower.set(xlim=(0, 1), xlabel="confidence (highest predicted probability)", ylabel="share of examples")
    lower.set_ylim(bottom=0)
    percent(upper.xaxis, upper.yaxis, lower.xaxis)
    percent(lower.yaxis, bins=3)
    if upper.get_legend_handles_labels()[0]:
        upper.legend(loc="upper left")
    return figure


@as_svg
def draw_confidence_over_training(document: Mapping[str, Any]) -> Figure:
    """Draw the confidence of some clients' models before, early in and after training (papers/003, Figure 3).

    There is a row for each kept round, and a column for each of five clients: those at the minimum, the quartiles and
    the maximum of entropy after the last round. Bars are the client's test examples by confidence, with correct
    predictions in colour.
    """
    rounds, ids, seen = document["rounds"], document["clients"]["ids"], document["clients"]["seen"]
    columns = _pictured(rounds[-1]["entropy"])
    figure = sheet(FULL, 0.45 + 1.35 * len(rounds))
    grid = figure.subplots(len(rounds), max(3, len(columns)), sharex=True, sharey="row", squeeze=False)
    for k, (one, line) in enumerate(zip(rounds, grid, strict=True)):
        line[0].set_ylabel(f"round {one['round']}")
        for client, axes in zip(columns, line, strict=False):
            title = f"{ids[client]}\n" if k == 0 else ""
            if one["examples"][client] is None:
                axes.set_title(f"{title}no answer", fontsize=7.5, fontweight="normal")
                continue
            examples, right = (np.asarray(one[key][client], dtype=np.float64) for key in ("examples", "right"))
            group = "seen" if seen[client] else "unseen"
            for counts, colour in ((examples, OTHER), (right, COLOURS[group])):
                axes.stairs(counts / examples.sum(), document["edges"], fill=True, color=colour)
            said = f"accuracy {right.sum() / examples.sum():.0%}\n"
            said += f"H {one['entropy'][client]:.2f}, I {one['mutual_information'][client]:.3f}"
            axes.set_title(f"{title}{said}", fontsize=7.5, fontweight="normal")
        line[0].set_ylim(bottom=0)
        percent(line[0].yaxis, bins=3)
        for axes in line[len(columns) :]:
            axes.set_visible(False)
    for axes in grid[-1]:
        axes.set(xlim=(0, 1), xlabel="confidence")
        percent(axes.xaxis, bins=3)
    return figure


@as_svg
def draw_accuracy_by_uncertainty(document: Mapping[str, Any]) -> Figure:
    """Draw each client's accuracy after the last round over its entropy and over its mutual information."""
    last = document["rounds"][-1]
    here = [i for i, counts in enumerate(last["examples"]) if counts is not None]
    seen = np.asarray(document["clients"]["seen"], dtype=bool)[here]
    accuracy = np.array([sum(last["right"][i]) / sum(last["examples"][i]) for i in here])
    figure = sheet(HALF, 4.6)
    for key, axes in zip(("entropy", "mutual_information"), figure.subplots(2, 1), strict=True):
        x, name = np.array([last[key][i] for i in here], dtype=np.float64), key.replace("_", " ")
        dots(axes, x, accuracy, seen)
        r = _rank_correlation(x, accuracy)
        axes.set(title=f"Accuracy by {name}", ylabel="accuracy")
        axes.set_xlabel(f"mean {name}, nats" + ("" if r is None else f" (Spearman's ρ {r:.2f})"))
        percent(axes.yaxis, bins=4)
    figure.axes[0].legend(loc="best")
    return figure


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Return Spearman's coefficient, with mean ranks for ties; None for fewer than three values or constant ones."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(_mean_ranks(a), _mean_ranks(b))[0, 1])


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks; equal values share their mean rank. A report of a run needs no scipy."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which])


def _pictured(entropy: Sequence[float | None]) -> list[int]:
    """Return clients at the minimum, quartiles and maximum of entropy, or all if few, in ascending order of entropy."""
    known = sorted((value, i) for i, value in enumerate(entropy) if value is not None)
    places = np.unique(np.linspace(0, len(known) - 1, min(PICTURED, len(known))).round().astype(int))
    return [known[place][1] for place in places]


def _groups(document: Mapping[str, Any]) -> dict[str, Sequence[Sequence[float]]]:
    """Return the available rows of ``seen`` and ``unseen`` (own model) and ``global`` (global model, all clients)."""
    personal, shared = document["personal"] or {}, document["global"] or {}
    found = {name: personal[name] for name in ("seen", "unseen") if personal.get(name)}
    parts = [np.asarray(rows, dtype=np.float64) for rows in shared.values() if rows]
    if parts:
        examples = np.sum([part[:, :1] for part in parts], axis=0)
        means = np.sum([part[:, :1] * part[:, 1:] for part in parts], axis=0) / np.maximum(examples, 1)
        found["global"] = np.concatenate([examples, means], axis=1).tolist()
    return found
