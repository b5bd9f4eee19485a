"""Tables of docs/results/private-descriptors.md."""

from __future__ import annotations

from collections.abc import Iterator

from summaries import Evaluation, Runs, after, last, table

from fedloom.theory.privacy import noise_multiplier

COLUMNS = ("validation", "seen_mean", "unseen_mean", "unseen_sd")
EPSILONS = ("8", "2", "1", "0.5")
HEADINGS = [f"ε = {epsilon}" for epsilon in EPSILONS]
LENGTH = 26
"""Of a descriptor of these runs."""


def tables(runs: Runs) -> Iterator[str]:
    """New clients' accuracy by ε, the noise behind it, the search for C, and training with noise."""
    rows = [
        (str(n), *(_shown(last(runs[_name("plain", n, epsilon)])) for epsilon in ("none", "inf", *EPSILONS)))
        for n in (500, 100)
    ]
    yield table(("images of a client", "without privacy", "clipped, no noise", *HEADINGS), rows)
    z = [noise_multiplier(float(epsilon), 1e-5) for epsilon in EPSILONS]
    rows = [("z", *(f"{one:.2f}" for one in z))]
    rows += [(f"norm of the noise, {n} images", *(f"{LENGTH**0.5 * 2 * one / n:.3f}" for one in z)) for n in (500, 100)]
    yield table(("", *HEADINGS), rows)
    clips = ("0.4", "0.6", "0.8", "1", "1.25")
    found = (f"{last(runs[f'plain/new-clients/C={clip}'])['validation']:.1f}" for clip in clips)
    yield table(("C", *clips), [("validation accuracy at ε = 1", *found)])
    plain = after(runs["plain"], 100)
    assert plain is not None
    noisy = [_shown(last(runs[_name("noisy", 500, epsilon)])) for epsilon in ("inf", *EPSILONS)]
    fewer = [_shown(last(runs[_name("noisy", 100, epsilon)])) for epsilon in ("inf", *EPSILONS)]
    rows = [
        ("without privacy", "500", f"{plain['unseen_mean']:.1f}", *[""] * 5),
        ("clipped, with the noise of ε = 1", "500", "", *noisy),
        ("clipped, with the noise of ε = 1", "100", "", *fewer),
    ]
    yield table(("trained", "images", "without privacy", "clipped, no noise", *HEADINGS), rows)


def _name(run: str, images: int, epsilon: str) -> str:
    return f"{run}/new-clients/n={images},C=1,eps={epsilon}"


def _shown(line: Evaluation) -> str:
    return f"{line['unseen_mean']:.1f}" + (f" ± {line['unseen_sd']:.1f}" if "unseen_sd" in line.values else "")
