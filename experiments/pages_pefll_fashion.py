"""The table of docs/results/pefll-fashion-mnist.md."""

from __future__ import annotations

from collections.abc import Iterator

from summaries import Run, Runs, last, spread, table

ACCURACIES = ("seen", "unseen", "seen_masked", "unseen_masked", "seen_worst_decile")
COLUMNS = ("validation", *ACCURACIES, "spearman", "seconds")
MANY = ("100", "1000")


def tables(runs: Runs) -> Iterator[str]:
    """Test accuracy and rank correlation in the last round, by seed and over seeds; then Local beside it."""
    rows = []
    for n in MANY:
        of = runs.under(f"n={n}")
        for run in of:
            rows.append((n, run[0].seed, *(f"{last(run)[q]:.1f}" for q in ACCURACIES), _spearman(run)))
        means = (f"**{spread([last(run)[q] for run in of])}**" for q in ACCURACIES)
        rows.append((n, "**mean ± std**", *means, ""))
    shown = ("seen", "unseen", "seen, masked", "unseen, masked", "worst decile, seen")
    rounds = last(runs.under("n=100")[0]).round
    yield table(("n", "seed", *shown, f"Spearman, unseen: round 0 → least → {rounds}"), rows, left=0)
    rows = []
    for name, folder in (("PeFLL", "n=100"), ("Local, 20 epochs", "local")):
        lines = [last(run) for run in runs.under(folder)]
        rows.append((name, *(spread([line[q] for line in lines]) for q in ("seen", "unseen"))))
    yield table(("n = 100", "seen", "unseen"), rows)


def _spearman(run: Run) -> str:
    values = [line["spearman"] for line in run]
    return f"{values[0]:.2f} → {min(values):.2f} → {values[-1]:.2f}"
