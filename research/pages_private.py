"""Tables of docs/results/private-descriptors.md. The unit is the seed, which draws clients, network and noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from summaries import Evaluation, Runs, after, last, spread, table

from fedloom.privacy.gaussian_mechanism import noise_multiplier

COLUMNS = ("validation", "seen_mean", "unseen_mean", "unseen_sd")
EPSILONS = ("8", "2", "1", "0.5")
HEADINGS = [f"ε = {epsilon}" for epsilon in EPSILONS]
CLIPS = ("0.4", "0.6", "0.8", "1", "1.25")
LENGTH = 26
"""Length of a descriptor in these runs."""
IMAGES = {"fashion-mnist": ("500", "100"), "cifar10": ("400", "100")}
"""Numbers of images of each new client by data set: the usual one, and the small one."""


def tables(runs: Runs) -> Iterator[str]:
    """Yield new clients' accuracy by ε, the noise behind it, the search for C, and training with noise."""
    for data, images in IMAGES.items():
        if folders := _seeds(runs, data, "plain"):
            yield _by_epsilon(runs, data, folders, images)
    z = [noise_multiplier(float(epsilon), 1e-5) for epsilon in EPSILONS]
    rows = [("z", *(f"{one:.2f}" for one in z))]
    rows += [(f"norm of the noise, {n} images", *(f"{LENGTH**0.5 * 2 * one / n:.3f}" for one in z)) for n in (500, 100)]
    yield table(("", *HEADINGS), rows)
    searched = [folder for data in IMAGES for folder in _seeds(runs, data, "plain")]
    found = [[last(runs[f"{folder}/new-clients/C={clip}"])["validation"] for clip in CLIPS] for folder in searched]
    shown = [[f"**{one:.1f}**" if one == max(row) else f"{one:.1f}" for one in row] for row in found]
    names = [folder.removesuffix("/plain").replace("/seed=", ", seed ") for folder in searched]
    yield table(("C", *CLIPS), [(name, *row) for name, row in zip(names, shown, strict=True)])
    plain = after(runs["fashion-mnist/seed=1/plain"], 100)
    assert plain is not None
    rows = [("without privacy", "500", f"{plain['unseen_mean']:.1f}", *[""] * 5)]
    for n in IMAGES["fashion-mnist"]:
        noisy = [_one(runs, "fashion-mnist/seed=1/noisy", n, epsilon) for epsilon in ("inf", *EPSILONS)]
        rows.append(("clipped, with the noise of ε = 1", n, "", *(_draws(line) for line in noisy)))
    yield table(("trained", "images", "without privacy", "clipped, no noise", *HEADINGS), rows)


def _by_epsilon(runs: Runs, data: str, folders: Sequence[str], images: Sequence[str]) -> str:
    """Return mean ± deviation over seeds (with one seed, over noise draws), then the loss of accuracy seed by seed."""
    rows: list[tuple[str, ...]] = []
    for n in images:
        lines = [[_one(runs, folder, n, epsilon) for folder in folders] for epsilon in ("none", "inf", *EPSILONS)]
        several = len(folders) > 1
        rows.append((n, *(spread([one["unseen_mean"] for one in of]) if several else _draws(of[0]) for of in lines)))
        if several:
            lost = (
                spread([b["unseen_mean"] - a["unseen_mean"] for a, b in zip(of, lines[0], strict=True)])
                for of in lines[1:]
            )
            rows.append((f"{n}: lost", "", *lost))
    return table((f"{data}: images", "without privacy", "clipped, no noise", *HEADINGS), rows)


def _seeds(runs: Runs, data: str, kind: str) -> list[str]:
    """Return the folders of one kind of run by seed."""
    return sorted(name for name in runs if name.startswith(f"{data}/seed=") and name.endswith(f"/{kind}"))


def _one(runs: Runs, folder: str, images: str, epsilon: str) -> Evaluation:
    """Return new clients' results with this number of images, at the run's C."""
    (name,) = (
        name
        for name in runs
        if name.startswith(f"{folder}/new-clients/n={images},") and name.endswith(f",eps={epsilon}")
    )
    return last(runs[name])


def _draws(line: Evaluation) -> str:
    return f"{line['unseen_mean']:.1f}" + (f" ± {line['unseen_sd']:.1f}" if "unseen_sd" in line.values else "")
