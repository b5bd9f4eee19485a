"""Comparison report: ``compare.html`` as one self-contained page, CSV, LaTeX and figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.core.home import expanded
from fedloom.core.words import pluralize
from fedloom.errors import ExperimentError, StorageError, argument
from fedloom.reporting.compare import RunComparison
from fedloom.reporting.compare_findings import GROUP_NAMES, caution, findings, sentence
from fedloom.reporting.compare_sections import line_styles_of, sections
from fedloom.reporting.compare_tables import as_latex, own_steps_as_csv, pairs_as_csv, rows_as_csv, value_cell
from fedloom.reporting.page import Fact, Lead, ReportPage, check_installed
from fedloom.reporting.run_results import USERS

PAGE = "compare.html"

NAMED = 6
"""Maximum number of methods that the title lists by name; more are counted."""


def check_out(out: Path) -> None:
    """Raise :class:`ExperimentError` unless ``out`` is a new folder, or an earlier comparison's."""
    if out.exists() and not (out / PAGE).is_file():
        raise ExperimentError(
            f"{argument('out')} must be a new folder, or one with a {PAGE} to replace (got {out}).",
            key="out",
            found=out,
        )


def write_comparison(comparison: RunComparison, out: str | Path) -> Path:
    """Write ``compare.html``, tables and figures to a folder (docs/evaluation.md); return the page's path.

    The folder is written atomically and replaces an earlier comparison. The same runs give the same bytes.

    Raises
    ------
    ExperimentError
        If a package is not installed, or ``out`` is not a comparison.
    StorageError
        If it cannot be written.
    """
    out = expanded(out)
    check_out(out)
    check_installed("matplotlib", "jinja2", "pandas", extra="compare")
    page = page_of(comparison)
    files = {PAGE: page.render(), "compare.csv": rows_as_csv(comparison), "compare.tex": as_latex(comparison)}
    files["pairs.csv"] = pairs_as_csv(comparison)
    if comparison.stepping:
        files["own_steps.csv"] = own_steps_as_csv(comparison)
    files |= {f"figures/{name}": svg for name, svg in page.figures().items()}
    with _replacing(out) as folder:
        (folder / "figures").mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return out / PAGE


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``out`` once it is complete."""
    part, old = (out.absolute().with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("partial", "old"))
    try:
        part.mkdir(parents=True)
        yield part
        if out.exists():
            out.rename(old)
        part.rename(out)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {(error.strerror or str(error)).lower()}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


def page_of(comparison: RunComparison) -> ReportPage:
    """Return the page: which method is best, the best results, and the sections."""
    from fedloom.reporting.compare_figures import COLOURS

    styles, leads, facts = line_styles_of(comparison), [], []
    for finding in findings(comparison):
        winner = finding.winner.label if finding.winner else ""
        data = {"group": finding.group, "best": finding.best.label, "winner": winner}
        leads.append(Lead(sentence(comparison, finding), data))
        label, best = finding.best.label, value_cell(comparison, finding.best, finding.group)
        if len(comparison.blocks) == 1:
            colour = styles[label].name if label in styles else ""
            is_best = finding.winner or finding.group == USERS
            name = f"{'best' if is_best else f'{comparison.headline.superlative} mean'}, {GROUP_NAMES[finding.group]}"
            facts.append(Fact(name, f"{best}{comparison.headline.unit}", label, colour))
    if note := caution(comparison):
        leads.append(Lead(note, {}))
    return ReportPage(
        _title(comparison),
        (_subtitle(comparison),),
        sections(comparison),
        COLOURS,
        leads=tuple(leads),
        notices=comparison.notices,
        facts={"best": tuple(facts)},
        broad=True,
    )


def _title(comparison: RunComparison) -> str:
    names = list(dict.fromkeys(row.method for row in comparison.rows))
    if len(names) > NAMED:
        return f"Comparison of {pluralize(len({row.runs[0].method for row in comparison.rows}), 'method')}"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _subtitle(comparison: RunComparison) -> str:
    runs = {run.path: run for row in comparison.rows for run in row.runs}.values()
    parts = (", ".join(dict.fromkeys(getattr(run, what) for run in runs)) for what in ("dataset", "model"))
    seeds = sorted({run.seed for run in runs})
    return " · ".join(
        [*parts, pluralize(len(runs), "run"), f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"]
    )
