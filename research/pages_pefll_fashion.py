"""Tables of docs/results/pefll-fashion-mnist.md."""

from __future__ import annotations

from collections.abc import Iterator

from summaries import Runs, last, spread, table

ACCURACIES = ("seen", "unseen", "seen_masked", "unseen_masked", "seen_worst_decile")
COLUMNS = ("validation", *ACCURACIES)


def tables(runs: Runs) -> Iterator[str]:
    """Yield test accuracy in the last round, by seed and over seeds, and a comparison with Local."""
    rows = []
    for n in ("100", "1000"):
        lines = [last(run) for run in runs.under(f"n={n}")]
        rows += [(n, line.seed, *(f"{line[q]:.1f}" for q in ACCURACIES)) for line in lines]
        rows.append((n, "**mean ± std**", *(f"**{spread([line[q] for line in lines])}**" for q in ACCURACIES)))
    shown = ("seen", "unseen", "seen, masked", "unseen, masked", "worst decile, seen")
    yield table(("n", "seed", *shown), rows, left=0)
    seed = runs.under("local")[0][0].seed
    rows = []
    for name, run in (("PeFLL", f"n=100/seed={seed}"), ("Local, 20 epochs", f"local/seed={seed}")):
        rows.append((name, *(f"{last(runs[run])[q]:.1f}" for q in ("seen", "unseen"))))
    yield table((f"n = 100, seed {seed}", "seen", "unseen"), rows)
