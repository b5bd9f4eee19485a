"""Section of a report on attacks: membership inference, canaries."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fedloom.core.words import pluralize
from fedloom.reporting.drawing import COLOURS, INK, as_svg, panel
from fedloom.reporting.page import Column, Panel, Part, tabulated
from fedloom.reporting.words import (
    Document,
    audit_verdict,
    estimate_note,
    in_percent,
    sampling_note,
    shown_bound,
    shown_epsilon,
)
from fedloom.runs.files import AUDIT
from fedloom.runs.folder import RunFolder


def audit_parts(run: RunFolder) -> tuple[Part, ...]:
    """Return a part for each attack in ``audit.json``."""
    document = run.json(AUDIT)
    canaries = (_canaries(document["canaries"], document["claim"]),) if "canaries" in document else ()
    return (*canaries, *((_membership(document["membership"]),) if "membership" in document else ()))


def _membership(attack: Document) -> Part:
    columns: list[Column[tuple[str, str, Any]]] = [
        Column("model", lambda item: f"{item[0]}, {item[1]} clients"),
        Column("AUC", lambda item: f"{item[2]['auc']:.3f}"),
        Column("mean of clients", lambda item: f"{item[2]['auc_clients']['mean']:.3f}"),
        Column("highest of a client", lambda item: "{highest:.3f} ({client})".format(**item[2]["auc_clients"])),
        Column("TPR at 1% FPR, %", lambda item: in_percent(item[2]["tpr_at_low_fpr"])),
        Column("ε at least", lambda item: shown_bound(item[2]["epsilon"])),
        Column("examples", lambda item: f"{item[2]['members']:,} / {item[2]['others']:,}"),
    ]
    table = tabulated(columns, [("", _results(attack))], lambda item: {"colour": item[1]})
    text = (
        f"Training and test examples of the same clients, distinguished by the loss of the model after round "
        f"{attack['round']}. An AUC of 0.5 is chance. Examples: trained on / not trained on. The global model was not "
        f"trained on any example of unseen clients. ε: lower bound with {100 * attack['confidence']:g} % confidence at "
        f"δ = {attack['delta']:g}, from half of the examples, by the threshold that is best for the other half. The "
        "bound assumes independent examples; those of a single training are only nearly independent."
    )
    panel = Panel("membership", draw_membership(attack))
    return Part("Membership inference", (panel,), (table,), columns=2, text=text)


def _results(membership: Document) -> list[tuple[str, str, Any]]:
    """Return predictor, group and result of each group that has one."""
    predictors = membership["predictors"].items()
    return [(name, group, result) for name, groups in predictors for group, result in groups.items() if result]


def _canaries(attack: Document, claim: Document | None) -> Part:
    guesses = attack["guesses_in"] + attack["guesses_out"]
    kind = attack["of"].removesuffix("s")
    pairs = [
        ("canaries", f"{pluralize(attack['canaries'], kind)}, {attack['in']} in"),
        ("guesses", f"{attack['guesses_in']} in and {attack['guesses_out']} out, {attack['right']} of {guesses} right"),
        ("ε at least", f"{shown_bound(attack['epsilon'])} at δ = {attack['delta']:g}"),
        ("largest possible bound", shown_bound(attack["largest_bound"])),
    ]
    if attack.get("normal_estimate") is not None:
        pairs.append(("if scores are normal", estimate_note(attack["normal_estimate"])))
    if "sampling" in attack:
        pairs.append(("sampling", sampling_note(attack["sampling"])))
    if claim is not None:
        pairs.append(("claimed ε", f"{shown_epsilon(claim['epsilon'])} at δ = {claim['delta']:g}, for {claim['of']}"))
    if attack.get("verdict") is not None:
        pairs.append(("verdict", attack["verdict"]))
    labels = {
        "direction": "A canary client sends a random direction as its update, or zeros; the score follows from the dot "
        "products of the direction with the sums that the server received, or with the change of the model.",
        "gradient": "The gradient of a canary example is a random direction, or 0; the score follows from the dot "
        "products of the direction with the noisy sums of its client.",
        "loss": "A canary example has a wrong target, and is trained on or left out; the score is the decrease of its "
        "loss.",
    }[attack["score"]]
    text = (
        f"A fair coin decided whether each canary was in this run. {labels} The bound holds with "
        f"{100 * attack['confidence']:g} % confidence (Steinke, Nasr, Jagielski 2023). {audit_verdict(attack, claim)}"
    )
    return Part("Canaries", pairs=tuple(pairs), text=text)


LOWEST = 1e-3
"""Lowest rate on the logarithmic axes."""


@as_svg
def draw_membership(membership: Document) -> Figure:
    """Draw true against false positive rates of membership inference, on logarithmic axes; the diagonal is chance."""
    figure, axes = panel(3.3)
    axes.plot([LOWEST, 1], [LOWEST, 1], color=INK, linewidth=0.7, alpha=0.5)
    for name, group, result in _results(membership):
        fpr, tpr = (np.maximum(rates, LOWEST) for rates in np.array(result["curve"]).T)
        dash = "-" if name == "personal" else "--"
        axes.plot(fpr, tpr, color=COLOURS[group], linestyle=dash, label=f"{name}, {group} clients")
    axes.set(
        title="Membership inference", xlabel="false positive rate", ylabel="true positive rate",
        xscale="log", yscale="log", xlim=(LOWEST, 1), ylim=(LOWEST, 1.05),
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([LOWEST, 0.01, 0.1, 1]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g}%"))
    axes.grid(visible=True, axis="both")
    axes.legend(loc="upper left")
    return figure
