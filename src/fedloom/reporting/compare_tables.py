"""Tables of a comparison: their columns, and the CSV files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fedloom.reporting.compare import LEVEL, Choice, RunComparison
from fedloom.reporting.compare_findings import GROUP_NAMES
from fedloom.reporting.compare_pairs import Pair
from fedloom.reporting.compare_rows import MeanStd, Row, own_steps_of, shown_value
from fedloom.reporting.page import DASH
from fedloom.reporting.run_results import GROUPS, USERS
from fedloom.reporting.tables import Cell, Column, Table, as_latex, records_as_csv, tabulated
from fedloom.reporting.words import human_bytes
from fedloom.tasks.names import ACCURACY, MODEL_LOSS

NARROW = 22
"""Width of the method column on a terminal, in characters."""


def group_columns(comparison: RunComparison, statistics: Mapping[str, str]) -> Iterator[Column[Row]]:
    """Yield columns of test results of the groups; for user 0, only the mean.

    Parameters
    ----------
    statistics
        Heading of each statistic (:class:`~fedloom.reporting.run_results.GroupStatistics`); a mean has its ±.
    """

    def column(group: str, statistic: str) -> Column[Row]:
        marks = dict(zip(map(id, comparison.rows), comparison.marks(group, statistic), strict=True))

        def cell(row: Row) -> Cell:
            if statistic == "mean":
                return Cell(value_cell(comparison, row, group), marks[id(row)])
            return Cell(mean_only(comparison, row.over_seeds(group, statistic)), marks[id(row)])

        return Column(statistics[statistic], cell, GROUP_NAMES[group])

    for group in comparison.groups:
        yield from (column(group, key) for key in statistics if group != USERS or key == "mean")


def _bytes(count: float | None) -> str:
    return human_bytes(None if count is None else round(count))


def _steps(row: Row) -> str:
    steps = row.new_client.client_steps
    return DASH if steps is None else f"{steps:g}"


COST_COLUMNS: tuple[Column[Row], ...] = (
    Column("steps", _steps, "new client"),
    Column("receives", lambda row: _bytes(row.new_client.payload_down), "new client"),
    Column("sends", lambda row: _bytes(row.new_client.payload_up), "new client"),
)
"""Cost of a new client: gradient steps, bytes received, bytes sent."""

LABEL: Column[Row] = Column("method", lambda row: row.label)
SEEDS: Column[Row] = Column("seeds", lambda row: str(len(row.seeds)))


def terminal_table(comparison: RunComparison) -> Table:
    """Return the table of a terminal: a block for each kind of data, details of a method on separate lines.

    Fractions are in percent; :func:`spread_note` explains ±.
    """
    steps, *sizes = COST_COLUMNS
    columns = [Column[Row]("method", lambda row: _narrow(row.method, *row.details))]
    for column in group_columns(comparison, {"mean": "", "worst_decile": "worst decile"}):
        columns.append(column._replace(heading=column.heading or column.above.removesuffix(" clients")))
    columns += [steps._replace(heading="client steps"), *sizes]
    return tabulated([column._replace(above="") for column in columns], comparison.blocks_of_rows(comparison.labels))


def text_title(comparison: RunComparison) -> str:
    """Return the title of :func:`terminal_table`."""
    return f"Results for each client (test {comparison.headline.heading}, {spread_note(comparison)})"


def choice_table(comparison: RunComparison) -> Table:
    """Return each method's setting chosen on validation, with its test results."""

    def name(choice: Choice) -> str:
        row = comparison.rows[choice.row]
        return _narrow(row.method, *row.details, *(f"({edge_note([key])})" for key in choice.edges))

    columns = [Column("chosen on validation", name), *choice_columns(comparison, "second", "{}")]
    return tabulated(columns, [("", comparison.chosen)])


def choice_columns(comparison: RunComparison, second: str, test: str) -> list[Column[Choice]]:
    """Return the columns of the results of chosen settings, under these headings of the runner-up and of a group."""

    def tested(group: str, choice: Choice) -> str:
        return comparison.shown(comparison.rows[choice.row].over_seeds(group))

    return [
        Column("of", lambda choice: str(choice.candidates)),
        Column("validation", lambda choice: comparison.shown(MeanStd(choice.validation, None))),
        Column(second, lambda choice: comparison.shown(MeanStd(choice.runner_up, None))),
        *(Column(test.format(group), partial(tested, group)) for group in comparison.groups),
    ]


def own_steps_table(rows: Sequence[Row], heading: str, shown: Callable[[MeanStd | None], str], **options: Any) -> Table:
    """Return a table of results after an unseen client's own steps."""

    def column(k: int) -> Column[Row]:
        return Column(str(k), lambda row: shown(row.own_steps.get(k)))

    columns = [LABEL._replace(heading=heading), *map(column, own_steps_of(rows))]
    return tabulated(columns, [("", rows)], **options)


def own_steps_tables(comparison: RunComparison) -> dict[str, Table]:
    """Return for each block, by its label, a table of results after an unseen client's own steps."""
    return {
        comparison.labels[block]: own_steps_table(
            [comparison.rows[i] for i in members], "after local steps", partial(mean_only, comparison)
        )
        for block, members in comparison.stepping.items()
    }


def latex_table(comparison: RunComparison) -> str:
    """Return the results for a LaTeX document; if there are several blocks, the first column is the block's data."""
    several = len(comparison.blocks) > 1
    columns = [
        *([Column[Row]("data", lambda row: comparison.labels[row.block])] if several else []),
        LABEL,
        SEEDS,
        *group_columns(comparison, {"mean": "mean", "worst_decile": "worst decile"}),
        *COST_COLUMNS,
    ]
    what = f"Test {comparison.headline.title}" + (" in percent" if comparison.headline.percent else "")
    return as_latex(
        tabulated(columns, [("", comparison.rows)], left=1 + several),
        f"{what}, mean over clients, {spread_note(comparison)}. {marks_note(comparison)}",
    )


def edge_note(keys: Sequence[str]) -> str:
    """Return a note if chosen values are at the edge of the values tried."""
    return f"{', '.join(key.rpartition('.')[2] for key in keys)} at the edge of its grid"


def spread_note(comparison: RunComparison) -> str:
    """Return a note that explains ±."""
    return "± over seeds" if comparison.several_seeds else "± over clients"


def marks_note(comparison: RunComparison, tied: str = "underlined") -> str:
    """Return a note that explains the marks of a table; ``tied`` is the style of tied rows."""
    over = {"clients": "the clients of one seed", "seeds": "seeds"}.get(comparison.tested_over, "seeds or clients")
    return (
        f"Bold: best. {tied.capitalize()}: not significantly different from "
        f"{reference_note(comparison)}, by a paired test over {over} with Holm's correction over "
        f"{'all pairs of rows' if comparison.against is None else 'the pairs with it'} at {100 * LEVEL:g} %."
    )


def reference_note(comparison: RunComparison) -> str:
    """Return the reference of the tests and how it was chosen."""
    first, *others = comparison.references.values()
    if others:
        return f"the reference of its block ({first.because})"
    return f"{comparison.rows[first.row].label} ({first.because})"


def value_cell(comparison: RunComparison, row: Row, group: str) -> str:
    """Return the mean test value ± its standard deviation: over seeds, or over clients if no row has several."""
    value = row.over_seeds(group)
    if value is None or comparison.several_seeds:
        return comparison.shown(value)
    over_clients = None if group == USERS else row.over_seeds(group, "std")  # user 0 is one client
    return comparison.shown(MeanStd(value.mean, None if over_clients is None else over_clients.mean))


def mean_only(comparison: RunComparison, value: MeanStd | None) -> str:
    """Return a mean without its standard deviation, as the table shows it."""
    return comparison.shown(None if value is None else MeanStd(value.mean, None))


def rows_as_csv(comparison: RunComparison) -> str:
    """Return a CSV line per row with every statistic: fractions, not percent, in full precision, empty if unknown.

    ``_std`` is over seeds; ``_over_clients`` is the mean over seeds of the standard deviation over clients.
    """
    groups = tuple(dict.fromkeys((*comparison.groups, *GROUPS)))
    marks = {group: comparison.marks(group) for group in groups}
    records = []
    for i, row in enumerate(comparison.rows):
        record = _identity(comparison, row)
        for group in groups:
            record |= _group_record(comparison.headline.name, row, group) | {f"{group}_mark": marks[group][i]}
        record |= _with_std("validation_last", row.validation(best=False))
        record |= _with_std("validation_best", row.validation(best=True))
        record["best_rounds"] = " ".join("" if r.best is None else str(r.best.round) for r in row.results)
        for group in groups:
            record |= _with_std(f"{group}_at_best", row.at_best(group))
        record |= {f"new_client_{key}": value for key, value in row.new_client._asdict().items()}
        record |= {"rounds": _mean(row.training("round")), "client_steps": _mean(row.training("client_steps"))}
        record |= {key: _mean(row.of_runs(key)) for key in ("payload_up", "payload_down", "wire_up", "wire_down")}
        if any(run.privacy is not None for one in comparison.rows for run in one.runs):
            record["epsilon"] = row.epsilon
        records.append(record | _with_std("duration_s", row.of_runs("duration_s")))
    return records_as_csv(records)


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


def _group_record(name: str, row: Row, group: str) -> dict[str, Any]:
    record: dict[str, Any] = _with_std(f"{group}_{name}", row.over_seeds(group))
    record[f"{group}_{name}_over_clients"] = _mean(row.over_seeds(group, "std"))
    record[f"{group}_clients"] = _mean(row.over_seeds(group, "clients"))
    record |= _with_std(f"{group}_worst_decile", row.over_seeds(group, "worst_decile"))
    if row.headline != MODEL_LOSS:
        record |= _with_std(f"{group}_pooled", row.over_seeds(group, "pooled"))
    if row.headline == ACCURACY:
        reading = "unmasked" if row.runs[0].masked else "masked"
        record |= _with_std(f"{group}_{reading}", row.over_seeds(group, "other"))
    return record


def pairs_as_csv(comparison: RunComparison) -> str:
    """Return a CSV line for each pair of rows of a block and group of clients."""
    return records_as_csv([_pair_record(comparison, pair) for pair in comparison.pairs])


def _pair_record(comparison: RunComparison, pair: Pair) -> dict[str, Any]:
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
    return records_as_csv([
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
    ])  # fmt: skip


def _narrow(method: str, *details: str) -> str:
    """Return a method and its details, wrapped to leave room for the other columns of a terminal."""
    wrap = textwrap.TextWrapper(NARROW, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([method, *(line for detail in details for line in wrap.wrap(detail))])


def _with_std(name: str, value: MeanStd | None) -> dict[str, Any]:
    return {name: _mean(value), f"{name}_std": None if value is None else value.std}


def _mean(value: MeanStd | None) -> float | None:
    return None if value is None else value.mean
