"""Tables of docs/results/vowel.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from summaries import Runs, last, spread, table

COLUMNS = (
    "validation", "seen_mean", "seen_worst_decile", "unseen_mean", "unseen_worst_decile", "global_seen_mean",
    "global_seen_worst_decile", "global_unseen_mean", "global_unseen_worst_decile", "seconds",
)  # fmt: skip
SIZES = ("0.003", "0.01", "0.03", "0.1", "0.3")


def tables(runs: Runs) -> Iterator[str]:
    """Yield the results of speakers and the search for step sizes."""
    fedavg, local = ([last(run) for run in runs.under(method)] for method in ("fedavg", "local"))
    methods = (
        ("the global model (FedAvg)", "0", "global_", fedavg, False),
        ("Local: alone, on its 22 examples", "300", "", local, False),
        ("the global model, fine-tuned", "100", "", fedavg, True),
    )
    rows = []
    for name, steps, of, lines, best in methods:
        cells = []
        for group in ("seen", "unseen"):
            cells.append(spread([line[f"{of}{group}_mean"] for line in lines]))
            cells.append(f"{statistics.fmean(line[f'{of}{group}_worst_decile'] for line in lines):.1f}")
        bold = (0, 1, 2) if best else ()
        cells = [f"**{cell}**" if i in bold else cell for i, cell in enumerate(cells)]
        rows.append((f"**{name}**" if best else name, steps, *cells))
    yield table(("model", "local steps", "seen", "worst decile", "unseen", "worst decile"), rows)
    rows = []
    for name, folder in (("FedAvg + fine-tuning", "grid-fedavg"), ("Local", "grid-local")):
        found = {size: _validation(runs, folder, size) for size in SIZES}
        best_one = max(found.values())
        first = next(size for size in SIZES if round(found[size], 1) == round(best_one, 1))
        shown = (f"**{value:.1f}**" if size == first else f"{value:.1f}" for size, value in found.items())
        rows.append((f"{name}, validation", *shown))
    yield table(("step size", *SIZES), rows)


def _validation(runs: Runs, folder: str, size: str) -> float:
    return statistics.fmean(
        last(run)["validation"] for run in runs.under(folder) if last(run).settings["algorithm.local.lr"] == size
    )
