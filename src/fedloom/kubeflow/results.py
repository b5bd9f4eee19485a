"""Results for the Kubeflow UI: numbers, metadata, and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.tasks.names import GROUPS, RESULT_HEADINGS, headline_of, result_rows, values_of

if TYPE_CHECKING:
    from fedloom.reporting.compare import RunComparison


def scores(statistics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of each group in ``summary.json`` or an evaluation, flat, with its headline metric."""
    headline = headline_of(statistics)
    result: dict[str, float] = {}
    for name in GROUPS:
        group = statistics[name] or {}
        numbers = {key: value for key, value in group.items() if isinstance(value, int | float)}
        numbers |= {f"{headline.name}_{key}": value for key, value in values_of(group, headline)._asdict().items()}
        result |= {f"{name}_{key}": value for key, value in numbers.items() if value is not None}
    return result


def run_metadata(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a model: what identifies the run in a summary, and its scores."""
    metadata = {key: summary[key] for key in ("name", "algorithm", "dataset", "model", "seed", "rounds")}
    if summary["best"] is not None:
        metadata["best_round"] = summary["best"]["round"]
    endings = (f"{headline_of(summary).name}_mean", "loss_mean")
    return metadata | {key: value for key, value in scores(summary).items() if key.endswith(endings)}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first column is text, the others are numbers."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table_of_results(statistics: Mapping[str, Any]) -> str:
    """Return the results of an evaluation by group: ``seen``, ``unseen`` and ``global`` as in ``summary.json``."""
    headline = headline_of(statistics)
    title = f"{headline.title} in percent" if headline.percent else headline.title
    head = (
        f"**{statistics['name']}** · {statistics['algorithm']} · seed {statistics['seed']} · "
        f"after round {statistics['round']}\n\nTest {title}, mean ± standard deviation over clients.\n\n"
    )
    return head + table(RESULT_HEADINGS, result_rows(statistics, headline.shown))


def comparison(compared: RunComparison) -> str:
    """Return runs side by side, best in bold, as in the pages of ``fedloom compare``."""
    from fedloom.reporting.compare_tables import findings, marks_note, sentence, terminal_table, text_title

    parts = [f"{sentence(compared, finding)}\n\n" for finding in findings(compared)]
    parts.append(f"{text_title(compared)}. {marks_note(compared, tied='italic')}\n")
    marks, results = {"best": "**", "tied": "*", "": ""}, terminal_table(compared)
    for title, lines in results.blocks:
        rows = [[f"{marks[cell.mark]}{cell.text}{marks[cell.mark]}" for cell in line.cells] for line in lines]
        parts += [f"\n### {title}\n\n" if len(compared.blocks) > 1 else "\n", table(results.headings, rows)]
    parts += [f"\n{notice}\n" for notice in compared.notices]
    return "".join(parts)
