"""Results as Markdown tables, for the Kubeflow UI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.tasks.headline import RESULT_HEADINGS, headline_of, result_rows
from fedloom.tasks.names import Headline

if TYPE_CHECKING:
    from fedloom.reporting.compare import RunComparison


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first column is text, the others are numbers."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def results(statistics: Mapping[str, Any]) -> str:
    """Return the results of an evaluation by group: ``seen``, ``unseen`` and ``global`` as in ``summary.json``."""
    headline = headline_of(statistics)
    head = (
        f"**{statistics['name']}** · {statistics['algorithm']} · seed {statistics['seed']} · "
        f"after round {statistics['round']}\n\nTest {_titled(headline)}, mean ± standard deviation over clients.\n\n"
    )
    return head + table(RESULT_HEADINGS, result_rows(statistics, headline.shown))


def _titled(headline: Headline) -> str:
    return f"{headline.title} in percent" if headline.percent else headline.title


def comparison(compared: RunComparison) -> str:
    """Return runs side by side, best in bold, as in the pages of ``fedloom compare``."""
    from fedloom.reporting.compare_findings import findings, sentence
    from fedloom.reporting.compare_tables import marks_note, terminal_table, text_title

    parts = [f"{sentence(compared, finding)}\n\n" for finding in findings(compared)]
    parts.append(f"{text_title(compared)}. {marks_note(compared, tied='italic')}\n")
    marks, results = {"best": "**", "tied": "*", "": ""}, terminal_table(compared)
    for title, lines in results.blocks:
        rows = [[f"{marks[cell.mark]}{cell.text}{marks[cell.mark]}" for cell in line.cells] for line in lines]
        parts += [f"\n### {title}\n\n" if len(compared.blocks) > 1 else "\n", table(results.headings, rows)]
    parts += [f"\n{notice}\n" for notice in compared.notices]
    return "".join(parts)
