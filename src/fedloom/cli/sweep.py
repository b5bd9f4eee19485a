"""Output of ``fedloom run --seeds ... --grid ...``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedloom.cli.tables import print_table
from fedloom.cli.use import show_comparison
from fedloom.reporting.compare import compare_runs


def show_sweep(folder: Path) -> None:
    """Show and write the results of a sweep.

    If settings were tried, show test accuracy only for those chosen on validation: showing all would invite choosing
    by test accuracy. `fedloom compare SWEEP` shows everything.
    """
    comparison = compare_runs([folder])
    tried = {
        (comparison.rows[choice.row].block, comparison.rows[choice.row].runs[0].method) for choice in comparison.chosen
    }
    chosen = {run.path for choice in comparison.chosen for run in comparison.rows[choice.row].runs}
    shown: dict[Path, None] = {}
    title = f"Validation {comparison.headline.heading} (seen clients, pooled)"
    rows: list[tuple[str, ...]] = []
    for row in comparison.rows:
        paths = [run.path for run in row.runs]
        candidate = (row.block, row.runs[0].method) in tried
        personal = [r for r in comparison.rows if r.runs == row.runs and r.predictor == "personal"]
        if candidate and (row in personal or not personal):  # without fine-tuning, every client has the global model
            mark = "  <- chosen" if chosen.issuperset(paths) else ""
            rows.append((row.label + mark, *(comparison.shown(row.validation(best=best)) for best in (False, True))))
        if not candidate or chosen.issuperset(paths):
            shown |= dict.fromkeys(paths)
    if comparison.chosen:
        print_table(title, ("", "last round", "best round"), rows)
    show_comparison(list(shown), folder / "comparison")
    typer.echo(f"comparison: {folder / 'comparison' / 'compare.html'}")
