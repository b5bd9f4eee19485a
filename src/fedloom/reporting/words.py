"""Wording of methods, numbers, sizes and times on pages and in tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.core.words import rounded_up
from fedloom.reporting.page import DASH

GROUP_TITLES = {"seen": "seen clients", "unseen": "unseen clients", "global": "global model"}
"""Groups of clients, and how pages call them."""


def method_title(summary: Mapping[str, Any]) -> str:
    """Return the name of a finished run's method on pages: the shortest title of its predictors."""
    titles: Mapping[str, str] = summary.get("titles") or {}
    return min(titles.values(), key=len, default=str(summary["algorithm"]))


def shown_epsilon(epsilon: float | None) -> str:
    """Return the ε of a guarantee with three digits; ``none`` without a guarantee."""
    return "none" if epsilon is None else rounded_up(epsilon)


def shown_guarantee(reading: Mapping[str, Any] | None) -> str:
    """Return the ε of a guarantee in a claim; a dash if an earlier version did not state it."""
    return DASH if reading is None else shown_epsilon(reading["epsilon"])


def shown_bound(epsilon: float | None) -> str:
    """Return a lower bound on ε with three digits; ∞ for an infinite one, which is null in documents."""
    return "∞" if epsilon is None else rounded_up(epsilon)


def audit_verdict(canaries: Mapping[str, Any], claim: Mapping[str, Any] | None) -> str:
    """Return a sentence that compares a bound from canaries with the run's claim, or says that there is none."""
    if claim is None:
        return "The run claims no ε for its training, so there is nothing to refute."
    claimed = f"(ε = {rounded_up(claim['epsilon'])}, δ = {claim['delta']:g}) for {claim['of']}"
    if claim["of"] != canaries["of"]:
        return f"The run claims {claimed}, but nothing for {canaries['of']}."
    if canaries["epsilon"] is None or canaries["epsilon"] > claim["epsilon"]:
        return f"The bound exceeds the claim of {claimed}: something in the mechanism or its accounting is wrong."
    most = canaries["largest_bound"]
    few = most is not None and most <= claim["epsilon"]
    return f"The bound is below the claim of {claimed}: it neither refutes nor proves it." + (
        " No result with so few canaries could have exceeded the claim." if few else ""
    )


OUTLINE_DB, COPY_DB = 3.0, 40.0
"""dB above the mean input from which a reconstruction is recognizable, and PSNR from which it is a copy."""


def inversion_note(inversion: Mapping[str, Any]) -> str:
    """Return sentences that explain the result of an inversion of updates."""
    last = inversion["cases"][-1]
    best, above = last["psnr_best"], last["psnr_best"] - last["psnr_of_mean_input"]
    text = (
        f"Each update is one step of FedAvg at the initial model. From {COPY_DB:g} dB on, a reconstruction is a copy; "
        "the mean input is a guess without any update. "
    )
    if inversion.get("noisy_steps"):
        text += "The steps are noisy, as in the run. "
    if inversion["secure_aggregation"]:
        text = f"Secure aggregation: no single update reaches the aggregator, so there is none to invert. {text}"
    if best >= COPY_DB:
        return f"{text}Even the {last['update']} contains a copy of an input."
    if above < OUTLINE_DB:
        return f"{text}On the {last['update']} the attack fails."
    return f"{text}The {last['update']} gives no copy, but {above:.0f} dB more than the mean input."


def human_bytes(count: int | None) -> str:
    """Return a byte count in decimal units, as communication is counted; a dash if unknown."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # values that round to 1000 take the next unit
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def is_masked(group: Mapping[str, Any]) -> bool:
    """Return whether a group's statistics are those under the label mask, with the unmasked ones nested."""
    return "unmasked" in group


def client_column(predictor: str, metric: str, reading: str = "unmasked") -> str:
    """Return the column of ``clients.csv`` that has a metric of a predictor under a reading."""
    return f"{predictor}_{metric}_{reading}"


def in_percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal, without the sign."""
    return f"{100 * fraction:.1f}"


def number_range(values: Sequence[int]) -> str:
    """Return the lowest, highest and median value, or the single value."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}, median {statistics.median(values):g}"


def human_time(seconds: float) -> str:
    """Return a duration with two or three digits: ``4.0 ms``, ``2.00 s``, ``13 s``, ``5 min 12 s``, ``1 h 40 min``."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
