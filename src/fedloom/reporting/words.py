"""Wording of methods, numbers, sizes and times on pages and in tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fedloom.core.words import rounded_down, rounded_up

Document: TypeAlias = Mapping[str, Any]
"""JSON object, such as a file of a run."""

ClientRow: TypeAlias = Mapping[str, str]
"""Line of ``clients.csv``."""

GROUP_TITLES = {"seen": "seen clients", "unseen": "unseen clients", "global": "global model"}
"""Groups of clients, and how pages call them."""


def method_title(summary: Document) -> str:
    """Return the name of a finished run's method on pages: the shortest title of its predictors."""
    titles: Mapping[str, str] = summary.get("titles") or {}
    return min(titles.values(), key=len, default=str(summary["algorithm"]))


def shown_epsilon(epsilon: float | None) -> str:
    """Return the ε of a guarantee with three digits; ``none`` without a guarantee."""
    return "none" if epsilon is None else rounded_up(epsilon)


def shown_bound(epsilon: float | None) -> str:
    """Return a lower bound on ε with three digits; ∞ for an infinite one, which is null in documents."""
    return "∞" if epsilon is None else rounded_down(epsilon)


def audit_verdict(canaries: Document, claim: Document | None) -> str:
    """Return sentences with the verdict of an audit by canaries on the run's claim, and its reasons."""
    if claim is None:
        return "The run claims no ε for its training, so there is nothing to refute."
    bound = f"(ε = {rounded_up(claim['epsilon'])}, δ = {claim['delta']:g}) for {claim['of']}"
    if claim["of"] != canaries["of"]:
        return f"The run claims {bound}, but nothing for {canaries['of']}."
    verdict, power = canaries["verdict"], canaries["power"]
    if verdict == "failed":
        reasons = " ".join(_FAILURES[test].format(**_figures(canaries)) for test in canaries["failed_by"])
        return f"Verdict: failed. {reasons} The claim of {bound} does not hold."
    if verdict == "no power":
        return f"Verdict: no power. Nothing speaks against the claim of {bound}, but {_lack_of_power(power)}"
    return (
        f"Verdict: passed. Nothing speaks against the claim of {bound}. With probability {power['probability']:g}, "
        f"this audit would have found noise of at most {in_percent(power['noise'])} % of the claimed."
    )


def estimate_note(estimate: Document) -> str:
    """Return a normal estimate of ε with its interval, and of the noise."""
    low, high = estimate["interval"]
    text = f"ε about {shown_bound(estimate['epsilon'])}"
    text += f" (from {shown_bound(low)} to {shown_epsilon(high) if high is not None else '∞'})"
    if "noise" not in estimate:
        return f"{text} if scores are normally distributed"
    noise = [
        "unlimited" if n is None else f"{in_percent(n)} %" for n in (estimate["noise"], *estimate["noise_interval"])
    ]
    return f"{text}, noise about {noise[0]} of the claimed (from {noise[1]} to {noise[2]})"


def sampling_note(sampling: Document) -> str:
    """Return how often canaries were drawn, and how often that is expected."""
    return (
        f"drawn {sampling['drawn']:,} times of {sampling['draws']:,} (expected: {sampling['drawn_expected']:,.0f}), "
        f"{sampling['repeats']:,} times twice in a row (expected: {sampling['repeats_expected']:,.0f}); "
        f"p = {sampling['p_value']:.2g}"
    )


_FAILURES = {
    "guesses": "The bound of the guesses, ε = {bound}, exceeds the claim.",
    "noise": "The training has at most {noise} % of the noise that it claims.",
    "sampling": "Canaries were not drawn as claimed: {sampling}.",
}
"""Reasons for which an audit fails, by test."""


def _figures(canaries: Document) -> dict[str, Any]:
    estimate = canaries.get("normal_estimate") or {}
    most = (estimate.get("noise_interval") or [None, None])[1]
    figures = {"bound": shown_bound(canaries["epsilon"]), "noise": "" if most is None else in_percent(most)}
    return figures | {"sampling": sampling_note(canaries["sampling"])}


def _lack_of_power(power: Document) -> str:
    """Return the end of a sentence that says what an audit without power finds, and a sentence with what it takes."""
    noise = power["noise"]
    detectable = (
        "not even the absence of all noise" if noise is None else f"only noise of at most {in_percent(noise)} %"
    )
    remedy = (
        f"It takes {power['canaries']:,} canaries." if power["canaries"] else "Use a larger model, or train longer."
    )
    return f"with probability {power['probability']:g} this audit finds {detectable} of the claimed. {remedy}"


def power_note(power: Document, claim: float, *, enough: bool) -> str:
    """Return sentences that say before a training what an audit by canaries can find; ``enough``: it has power."""
    if enough:
        noise = in_percent(power["noise"])
        return (
            f"With probability {power['probability']:g}, this audit finds noise of at most {noise} % of the claimed, "
            f"which gives ε = {shown_bound(power['epsilon'])} instead of {rounded_up(claim)}."
        )
    return f"This audit has no power: {_lack_of_power(power)}"


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


def is_masked(group: Document) -> bool:
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
