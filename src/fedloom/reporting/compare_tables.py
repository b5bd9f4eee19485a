"""Tables of a comparison: cells for a terminal or a page, CSV, and LaTeX."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.reporting.compare import LEVEL, RunComparison
from fedloom.reporting.compare_findings import GROUP_NAMES
from fedloom.reporting.compare_rows import MeanStd, Row, own_steps_of, shown_value
from fedloom.reporting.page import DASH, Cell, check_installed
from fedloom.reporting.run_results import GROUPS, USERS
from fedloom.reporting.words import human_bytes
from fedloom.tasks.names import ACCURACY, MODEL_LOSS

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedloom.reporting.compare_pairs import Pair

NARROW = 22
"""Width of the method column on a terminal, in characters."""


def headings(comparison: RunComparison) -> tuple[str, ...]:
    """Return the columns of :func:`as_text`: the groups with results, and the cost of a new client."""
    groups = [(GROUP_NAMES[g],) if g == USERS else (g, "worst decile") for g in comparison.groups]
    return ("method", *sum(groups, ()), "client steps", "receives", "sends")


def text_title(comparison: RunComparison) -> str:
    """Return the title of :func:`as_text`."""
    return f"Results for each client (test {comparison.headline.heading}, {spread_note(comparison)})"


def as_text(comparison: RunComparison) -> dict[str, list[tuple[Cell, ...]]]:
    """Return rows of cells under :func:`headings` for each block, by the block's label.

    Fractions are in percent; :func:`spread_note` explains ±. Details are on separate lines.
    """
    values = _value_cells(comparison)
    return {
        comparison.labels[block]: [
            (Cell(_narrow(row.method, *row.details)), *values[i], *map(Cell, cost_cells(row)))
            for i in members
            if (row := comparison.rows[i])
        ]
        for block, members in comparison.blocks.items()
    }


def choice_headings(comparison: RunComparison) -> tuple[str, ...]:
    """Return the columns of :func:`choices_as_text`."""
    return ("chosen on validation", "of", "validation", "second", *comparison.groups)


def choices_as_text(comparison: RunComparison) -> list[tuple[str, ...]]:
    """Return rows under :func:`choice_headings`: each method's setting chosen on validation, with its test results."""
    found, shown = [], comparison.shown
    for choice in comparison.chosen:
        row = comparison.rows[choice.row]
        tests = [shown(row.over_seeds(group)) for group in comparison.groups]
        name = _narrow(row.method, *row.details, *(f"({edge_note([key])})" for key in choice.edges))
        validation = (shown(MeanStd(value, None)) for value in (choice.validation, choice.runner_up))
        found.append((name, str(choice.candidates), *validation, *tests))
    return found


def own_steps_as_text(comparison: RunComparison) -> dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return for each block, by its label, headings and rows of results after an unseen client's own steps."""
    found = {}
    for block, members in comparison.stepping.items():
        rows = [comparison.rows[i] for i in members]
        steps = own_steps_of(rows)
        lines = [(row.label, *(mean_only(comparison, row.own_steps.get(k)) for k in steps)) for row in rows]
        found[comparison.labels[block]] = (("after local steps", *map(str, steps)), lines)
    return found


def edge_note(keys: Sequence[str]) -> str:
    """Return a note if chosen values are at the edge of the values tried."""
    return f"{', '.join(key.rpartition('.')[2] for key in keys)} at the edge of its grid"


def spread_note(comparison: RunComparison) -> str:
    """Return a note that explains ±."""
    return "± over seeds" if comparison.several_seeds else "± over clients"


def marks_note(comparison: RunComparison, tied: str = "underlined") -> str:
    """Return a note that explains the marks of :func:`as_text`; ``tied`` is the style of tied rows."""
    over = {"clients": "the clients of one seed", "seeds": "seeds"}.get(comparison.tested_over, "seeds or clients")
    return (
        f"Bold: best. {tied.capitalize()}: not significantly different from "
        f"{reference_note(comparison)}, by a paired test over {over} with Holm's correction over "
        f"{'all pairs of rows' if comparison.against is None else 'the pairs with it'} at {100 * LEVEL:g} %."
    )


def reference_note(comparison: RunComparison) -> str:
    """Return the reference of the tests and how it was chosen."""
    found = list(comparison.references.values())
    if len(found) > 1:
        return f"the reference of its block ({found[0].because})"
    return f"{comparison.rows[found[0].row].label} ({found[0].because})"


def value_cell(comparison: RunComparison, row: Row, group: str) -> str:
    """Return the mean test value ± its standard deviation: over seeds, or over clients if no row has several."""
    found = row.over_seeds(group)
    if found is None or comparison.several_seeds:
        return comparison.shown(found)
    over_clients = None if group == USERS else row.over_seeds(group, "std")  # user 0 is one client
    return comparison.shown(MeanStd(found.mean, None if over_clients is None else over_clients.mean))


def mean_only(comparison: RunComparison, value: MeanStd | None) -> str:
    """Return a mean without its standard deviation, as the table shows it."""
    return comparison.shown(None if value is None else MeanStd(value.mean, None))


def cost_cells(row: Row) -> tuple[str, str, str]:
    """Return a new client's cost: gradient steps, bytes received, bytes sent."""
    steps, *sizes = row.new_client
    down, up = (human_bytes(None if size is None else round(size)) for size in sizes)
    return DASH if steps is None else f"{steps:g}", down, up


def rows_as_csv(comparison: RunComparison) -> str:
    """Return a CSV line per row with every statistic: fractions, not percent, in full precision, empty if unknown.

    ``_std`` is over seeds; ``_over_clients`` is the mean over seeds of the standard deviation over clients.
    """
    groups = tuple(dict.fromkeys((*comparison.groups, *GROUPS)))
    marks = {group: comparison.marks(group) for group in groups}
    lines = []
    for i, row in enumerate(comparison.rows):
        line = _identity(comparison, row)
        for group in groups:
            line |= _group_columns(comparison.headline.name, row, group) | {f"{group}_mark": marks[group][i]}
        line |= _with_std("validation_last", row.validation(best=False))
        line |= _with_std("validation_best", row.validation(best=True))
        line["best_rounds"] = " ".join("" if r.best is None else str(r.best.round) for r in row.results)
        for group in groups:
            line |= _with_std(f"{group}_at_best", row.at_best(group))
        line |= {f"new_client_{key}": value for key, value in row.new_client._asdict().items()}
        line |= {"rounds": _mean(row.training("round")), "client_steps": _mean(row.training("client_steps"))}
        line |= {key: _mean(row.of_runs(key)) for key in ("payload_up", "payload_down", "wire_up", "wire_down")}
        if any(run.privacy is not None for one in comparison.rows for run in one.runs):
            line["epsilon"] = row.epsilon
        lines.append(line | _with_std("duration_s", row.of_runs("duration_s")))
    return _csv(lines)


def _identity(comparison: RunComparison, row: Row) -> dict[str, Any]:
    run = row.runs[0]
    return {
        "label": row.label,
        "method": row.method,
        "algorithm": run.algorithm,
        "predictor": row.predictor,
        "dataset": run.dataset,
        "model": run.model,
        "reading": ("masked" if run.masked else "unmasked") if row.headline == ACCURACY else run.headline.name,
        **{key: shown_value(row.settings[key]) if key in row.settings else None for key in comparison.differing},
        "n_seeds": len(row.seeds),
        "seeds": " ".join(map(str, row.seeds)),
        "runs": " ".join(one.name for one in row.runs),
    }


def _group_columns(name: str, row: Row, group: str) -> dict[str, Any]:
    found: dict[str, Any] = _with_std(f"{group}_{name}", row.over_seeds(group))
    found[f"{group}_{name}_over_clients"] = _mean(row.over_seeds(group, "std"))
    found[f"{group}_clients"] = _mean(row.over_seeds(group, "clients"))
    found |= _with_std(f"{group}_worst_decile", row.over_seeds(group, "worst_decile"))
    if row.headline != MODEL_LOSS:
        found |= _with_std(f"{group}_pooled", row.over_seeds(group, "pooled"))
    if row.headline == ACCURACY:
        reading = "unmasked" if row.runs[0].masked else "masked"
        found |= _with_std(f"{group}_{reading}", row.over_seeds(group, "other"))
    return found


def pairs_as_csv(comparison: RunComparison) -> str:
    """Return a CSV line for each pair of rows of a block and group of clients."""
    return _csv([_pair_columns(comparison, pair) for pair in comparison.pairs])


def _pair_columns(comparison: RunComparison, pair: Pair) -> dict[str, Any]:
    rows, block = comparison.rows, comparison.rows[pair.first].block
    t_low, t_high = pair.interval or (None, None)
    bootstrap_low, bootstrap_high = pair.bootstrap or (None, None)
    return {
        "group": pair.group,
        "first": rows[pair.first].label,
        "second": rows[pair.second].label,
        "data": comparison.labels[block],
        "seeds": " ".join(map(str, pair.seeds)),
        "clients": pair.clients,
        "first_better": pair.better,
        "equal": pair.clients - pair.better - pair.worse,
        "second_better": pair.worse,
        "median_difference": pair.median,
        "p": pair.p,
        "p_holm": pair.p_holm,
        "test_over": pair.over if pair.p is not None else "",
        "mean_difference": pair.mean,
        "t_low": t_low,
        "t_high": t_high,
        "bootstrap_low": bootstrap_low,
        "bootstrap_high": bootstrap_high,
        "p_of_seeds": " ".join(map(repr, pair.p_of_seeds)),
        "not_comparable": pair.why,
        "p_holm_against": pair.p_against,
        "against": "" if pair.p_against is None else rows[comparison.references[block].row].label,
    }


def own_steps_as_csv(comparison: RunComparison) -> str:
    """Return a CSV line for each row, seed and number of an unseen client's extra local steps, with fractions."""
    return _csv(
        [
            {
                "label": row.label,
                "data": comparison.labels[block],
                "seed": run.seed,
                "steps": k,
                "clients": group.clients,
                comparison.headline.name: group.mean,
                "worst_decile": group.worst_decile,
                "other_reading": group.other,
            }
            for block, members in comparison.stepping.items()
            for row in (comparison.rows[i] for i in members)
            for run in row.runs
            for k, group in run.own_steps.items()
        ]
    )


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return lines as CSV with the columns of all of them, in order of first use; empty text if there are none."""
    text: str = _frame(lines).to_csv(index=False, lineterminator="\n") if lines else ""
    return text


def _frame(lines: Sequence[Any], **options: Any) -> DataFrame:
    check_installed("pandas", extra="compare")
    import pandas

    frame: DataFrame = pandas.DataFrame(lines, dtype=object, **options)
    return frame


def as_latex(comparison: RunComparison) -> str:
    r"""Return a ``table`` for a LaTeX document with the package ``booktabs``: best in bold, tied rows underlined.

    If there are several blocks, the first column is the block's data.
    """
    check_installed("pandas", "jinja2", extra="compare")
    import pandas

    several, values = len(comparison.blocks) > 1, _value_cells(comparison)
    columns = [*([("", "data")] if several else []), ("", "method"), ("", "seeds")]
    for group in comparison.groups:
        columns += [(GROUP_NAMES[group], name) for name in (("mean",) if group == USERS else ("mean", "worst decile"))]
    columns += [("new client", name) for name in ("steps", "receives", "sends")]
    lines = []
    for i, row in enumerate(comparison.rows):
        about = [*([comparison.labels[row.block]] if several else []), row.label, str(len(row.seeds))]
        lines.append([*map(escaped, about), *map(_latex, values[i]), *map(escaped, cost_cells(row))])
    text = 2 if several else 1
    what = f"Test {comparison.headline.title}" + (" in percent" if comparison.headline.percent else "")
    latex: str = _frame(lines, columns=pandas.MultiIndex.from_tuples(columns)).to_latex(
        index=False,
        escape=False,
        column_format=f"@{{}}{'l' * text}{'r' * (len(columns) - text)}@{{}}",
        multicolumn_format="c",
        caption=escaped(f"{what}, mean over clients, {spread_note(comparison)}. {marks_note(comparison)}"),
    )
    head, body = latex.replace("\\begin{table}\n", "\\begin{table}\n\\centering\n").split("\\\\\n", 1)
    return f"% needs \\usepackage{{booktabs}}\n{head}\\\\\n{_rules([above for above, _ in columns])}\n{body}"


def _rules(above: Sequence[str]) -> str:
    """Return the rules below the headings of groups of columns."""
    found, end = "", 0
    for name, same in itertools.groupby(above):
        start, end = end + 1, end + len(list(same))
        if name:
            found += rf"\cmidrule({'l' if end == len(above) else 'lr'}){{{start}-{end}}}"
    return found


_SPECIAL = {ord(c): rf"\{c}" for c in "&%$#_{}"} | str.maketrans({
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "±": r"$\pm$", "–": "--",
})  # fmt: skip


def escaped(text: str) -> str:
    """Return a text with LaTeX's special characters escaped."""
    return text.translate(_SPECIAL)


def _latex(cell: Cell) -> str:
    mean, plus_minus, std = cell.text.partition(" ± ")
    command = {"best": r"\textbf", "tied": r"\underline"}.get(cell.mark)
    shown = escaped(mean) if command is None else f"{command}{{{escaped(mean)}}}"
    return rf"{shown} $\pm$ {std}" if plus_minus else shown


def _value_cells(comparison: RunComparison) -> list[list[Cell]]:
    """Return for each row the mean and worst decile of the groups with results; for user 0, only the mean."""
    cells: list[list[Cell]] = [[] for _ in comparison.rows]
    for group in comparison.groups:
        means, deciles = comparison.marks(group), comparison.marks(group, "worst_decile")
        for row, mean, decile, line in zip(comparison.rows, means, deciles, cells, strict=True):
            line.append(Cell(value_cell(comparison, row, group), mean))
            if group != USERS:
                line.append(Cell(mean_only(comparison, row.over_seeds(group, "worst_decile")), decile))
    return cells


def _narrow(method: str, *details: str) -> str:
    """Return a method and its details, wrapped to leave room for the other columns of a terminal."""
    wrap = textwrap.TextWrapper(NARROW, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([method, *(line for detail in details for line in wrap.wrap(detail))])


def _with_std(name: str, value: MeanStd | None) -> dict[str, Any]:
    return {name: _mean(value), f"{name}_std": None if value is None else value.std}


def _mean(value: MeanStd | None) -> float | None:
    return None if value is None else value.mean
