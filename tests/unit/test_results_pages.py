"""Every table of docs/results is made from the page's compact file, or is listed here: its runs are not kept."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "experiments"))

import results  # noqa: E402
import summaries  # noqa: E402

NOT_KEPT = {
    "natural": ["| seen | worst decile", "| seen | unseen"],
    "pefll-cifar10": ["after | 1 round | 101 rounds"],
    "pefll-fashion-mnist": ["n | seed"],
    "quickstart": ["local rate", "what a client gets"],
    "wga": ["rule | above", "rule | α", "rule | η = 0.03", "rule | η | seed"],
}
"""Tables by the start of their header: the runs behind them, or their raw figures, are in no compact file."""


def tables_of(page: str) -> list[str]:
    lines = (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return ["\n".join(those) for is_table, those in groupby(lines, lambda line: line.startswith("|")) if is_table]


@pytest.mark.parametrize("page", sorted(results.PAGES))
def test_every_table_made_from_the_compact_file_is_in_the_page(page: str) -> None:
    made = list(results.PAGES[page].tables(summaries.read(RESULTS / f"{page}.csv")))
    on_page = tables_of(page)
    assert [table for table in made if table not in on_page] == []


@pytest.mark.parametrize("page", sorted(path.stem for path in RESULTS.glob("*.md")))
def test_every_other_table_of_a_page_is_known(page: str) -> None:
    file = RESULTS / f"{page}.csv"
    made = list(results.PAGES[page].tables(summaries.read(file))) if page in results.PAGES else []
    others = [table.splitlines()[0] for table in tables_of(page) if table not in made]
    known = NOT_KEPT.get(page, [])
    assert [header for header in others if not any(header.startswith(f"| {start}") for start in known)] == []
    assert len(others) == len(known)


def test_pages_show_every_figure_that_is_there_and_no_other() -> None:
    shown = {
        name
        for path in [*RESULTS.glob("*.md"), ROOT / "README.md"]
        for name in re.findall(r"!\[[^]]*\]\((?:docs/results/)?([^)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert shown == {path.name for path in RESULTS.glob("*.svg")}


@pytest.mark.parametrize("page", sorted(results.PAGES))
def test_a_compact_file_is_read_as_it_was_written(page: str) -> None:
    path = RESULTS / f"{page}.csv"
    assert summaries.written(summaries.read(path), results.PAGES[page].columns) == path.read_text(encoding="utf-8")
