"""Tables of results, as a terminal shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def results(summary: dict[str, Any]) -> Table:
    """The table that a run ends with."""
    headings = ("", "clients", "mean ± std", "worst decile", "worst", "pooled", "loss")
    table = narrow(f"{summary['name']} · {summary['algorithm']} · seed {summary['seed']}", headings)
    for label, group in (("seen", "seen"), ("unseen", "unseen"), ("global model", "global")):
        row = summary[group]
        if row is not None:
            table.add_row(
                label,
                str(row["clients"]),
                *_accuracies(row),
                f"{row['loss_mean']:.4f}",
            )
    return table


def _accuracies(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Four cells of :func:`results`; dashes for data without classes."""
    if row["accuracy_mean"] is None:
        return ("–",) * 4
    mean = f"{row['accuracy_mean']:.4f} ± {row['accuracy_std']:.4f}"
    return (mean, *(f"{row[f'accuracy_{key}']:.4f}" for key in ("worst_decile", "worst", "pooled")))


def narrow(title: str, headings: Sequence[str]) -> Table:
    """A table whose first column is text and whose headings, not cells, wrap: it fits eighty columns."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        heading = heading.replace(" ", "\n") if i and "±" not in heading else heading
        table.add_column(heading, justify="right" if i else "left", no_wrap=True, vertical="bottom")
    return table
