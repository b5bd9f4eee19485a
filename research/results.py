"""Results pages: compact files from finished runs, and tables and figures from the compact files.

    python research/results.py fold PAGE RUNS      docs/results/PAGE.csv from runs that fedloom reproduce made
    python research/results.py tables PAGE         the page's tables, in Markdown
    python research/results.py figures PAGE        its figures, docs/results/PAGE-*.svg
    python research/results.py chosen FOLDER [KEY] the step size, or another key, that validation chooses in a sweep

PAGE is a page of docs/results. ``fold`` keeps the lines of runs that are not in RUNS, so that a page can be made in
parts. tests/unit/test_results_pages.py recreates every table and checks that the page has it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import leaderboard
import pages_baselines
import pages_comfedl
import pages_flowdup
import pages_natural
import pages_open_federation
import pages_own_steps
import pages_own_tasks
import pages_pefll
import pages_pefll_fashion
import pages_pfedbayes
import pages_private
import pages_quickstart
import pages_training_privacy
import pages_vowel
import pages_wga
from made import with_commits
from matplotlib.figure import Figure
from summaries import Runs, chosen_value, fold, read, written

from fedloom.reporting.drawing import as_svg

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Page:
    """Page: its tables and figures as functions of its runs, and the content of its compact file.

    ``columns`` are the quantities, or all measured ones if empty. Runs that match a pattern in ``whole`` keep every
    evaluation, others the last and the chosen one. Runs in ``searches`` keep only the last validation accuracy, and
    their folder's name instead of settings. ``more`` measures what runs do not record. ``folded`` replaces all of this:
    it makes the compact file from the runs' folder. ``paper`` has the paper's figures that the page cites, by
    pattern of runs and quantity.
    """

    tables: Callable[[Runs], Iterator[str]]
    figures: Mapping[str, Callable[[Runs], Figure]] = field(default_factory=dict)
    columns: Sequence[str] = ()
    whole: Sequence[str] = ()
    searches: Sequence[str] = ()
    more: Callable[[Path], dict[str, float]] | None = None
    folded: Callable[[Path], Runs] | None = None
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


PAGES = {
    "baselines": Page(
        pages_baselines.tables,
        columns=pages_baselines.COLUMNS,
        searches=pages_baselines.SEARCHES,
        paper=pages_baselines.paper_figures(),
    ),
    "comfedl": Page(pages_comfedl.tables, pages_comfedl.FIGURES, pages_comfedl.COLUMNS, pages_comfedl.WHOLE),
    "flowdup": Page(pages_flowdup.tables, columns=pages_flowdup.COLUMNS, folded=pages_flowdup.folded),
    "leaderboard": Page(leaderboard.tables),
    "natural": Page(
        pages_natural.tables,
        pages_natural.FIGURES,
        pages_natural.COLUMNS,
        ("roles/test/*",),
        ("roles/search/*",),
        more=pages_quickstart.measured_too,
    ),
    "open-federation": Page(pages_open_federation.tables, folded=pages_open_federation.folded),
    "own-steps": Page(
        pages_own_steps.tables,
        {"curves": pages_own_steps.curves},
        columns=pages_own_steps.COLUMNS,
        folded=pages_own_steps.folded,
    ),
    "own-tasks": Page(
        pages_own_tasks.tables,
        {"clients": pages_own_tasks.clients},
        columns=pages_own_tasks.COLUMNS,
        folded=pages_own_tasks.folded,
    ),
    "pefll-cifar10": Page(
        pages_pefll.tables, pages_pefll.FIGURES, pages_pefll.COLUMNS, ("*",), paper=pages_pefll.PAPER
    ),
    "pefll-fashion-mnist": Page(pages_pefll_fashion.tables, columns=pages_pefll_fashion.COLUMNS),
    "pfedbayes": Page(
        pages_pfedbayes.tables,
        pages_pfedbayes.FIGURES,
        pages_pfedbayes.COLUMNS,
        pages_pfedbayes.WHOLE,
        more=pages_pfedbayes.measured_too,
        paper=pages_pfedbayes.paper_figures(),
    ),
    "private-descriptors": Page(pages_private.tables, columns=pages_private.COLUMNS, whole=("*",)),
    "quickstart": Page(
        pages_quickstart.tables,
        pages_quickstart.FIGURES,
        pages_quickstart.COLUMNS,
        searches=pages_quickstart.SEARCHES,
        more=pages_quickstart.measured_too,
    ),
    "training-privacy": Page(
        pages_training_privacy.tables,
        pages_training_privacy.FIGURES,
        pages_training_privacy.COLUMNS,
        searches=pages_training_privacy.SEARCHES,
        more=pages_training_privacy.cost,
    ),
    "vowel": Page(pages_vowel.tables, columns=pages_vowel.COLUMNS),
    "wga": Page(
        pages_wga.tables,
        pages_wga.FIGURES,
        pages_wga.COLUMNS,
        ("quadratic/*",),
        more=pages_wga.best_loss,
    ),
}


def compact(svg: str) -> str:
    """Return a smaller SVG that draws the same: hundredths of a point, one line per path."""
    svg = re.sub(r"\n(?=[A-Zz\"] ?)", " ", svg)
    svg = re.sub(r"(?<=\d)(\.\d\d)\d+", r"\1", svg)
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    return re.sub(r">\s+<(?!path|text|/svg)", "><", svg)


def folded(page: Page, folder: Path, before: Runs) -> Runs:
    """Return a page's runs in a folder, as they stand in its compact file, and those of compact files in it."""
    if page.folded is not None:
        return page.folded(folder)
    found = fold(folder, whole=page.whole, searches=page.searches, more=page.more, before=before)
    for path in sorted(folder.glob("*.csv")):  # from research/wga_figures.py
        found |= read(path)
    return found


def published(name: str) -> Runs:
    """Return the runs of a page's compact file; none if it is made from the files of other pages."""
    file = RESULTS / f"{name}.csv"
    return read(file) if file.exists() else Runs()


def main() -> None:
    """Run the requested command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fold", "tables", "figures", "chosen"))
    parser.add_argument("page", help=f"{', '.join(PAGES)}; for chosen, a folder")
    parser.add_argument("runs", nargs="?", help="for fold: the folder of the finished runs; for chosen: the key")
    given = parser.parse_args()
    if given.what == "chosen":
        print(chosen_value(Path(given.page), given.runs or "algorithm.local.lr"))
        return
    if given.page not in PAGES:
        parser.error(f"PAGE must be one of {', '.join(PAGES)} (got {given.page})")
    page, file = PAGES[given.page], RESULTS / f"{given.page}.csv"
    if given.what == "fold":
        folder = Path(given.runs or "")
        if given.runs is None or not folder.is_dir():
            parser.error(f"fold PAGE RUNS needs the folder of the finished runs (got {given.runs})")
        before = published(given.page)
        found = with_commits(folder, folded(page, folder, before))
        file.write_text(written(Runs(before | found), page.columns), encoding="utf-8")
    elif given.what == "tables":
        print("\n\n".join(page.tables(published(given.page))))
    else:
        runs = published(given.page)
        for name, draw in page.figures.items():
            (RESULTS / f"{given.page}-{name}.svg").write_text(compact(as_svg(draw)(runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
