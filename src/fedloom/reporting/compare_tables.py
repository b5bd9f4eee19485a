"""Findings and tables of a comparison: sentences, columns, LaTeX and CSV files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fedloom.core.words import pluralize
from fedloom.reporting.compare import GROUP_NAMES, LEVEL, Choice, RunComparison
from fedloom.reporting.page import DASH, Cell, Column, Table, as_latex, records_as_csv, tabulated
from fedloom.reporting.run_results import GROUPS, USERS, MeanStd, Row, own_steps_of, shown_value
from fedloom.reporting.significance import Pair, least_p
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

    for group in comparison.groups:
        for statistic, heading in statistics.items():
            if group != USERS or statistic == "mean":
                marks = dict(zip(map(id, comparison.rows), comparison.marks(group, statistic), strict=True))

                def cell(row: Row, group: str = group, statistic: str = statistic, marks: Any = marks) -> Cell:
                    value = value_cell(comparison, row, group)
                    if statistic != "mean":
                        value = mean_only(comparison, row.over_seeds(group, statistic))
                    return Cell(value, marks[id(row)])

                yield Column(heading, cell, GROUP_NAMES[group])


def _cost(key: str, display: Callable[[float], str] = lambda count: human_bytes(round(count))) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = getattr(row.new_client, key)
        return DASH if value is None else display(value)

    return cell


COST_COLUMNS: tuple[Column[Row], ...] = (
    Column("steps", _cost("client_steps", "{:g}".format), "new client"),
    Column("receives", _cost("payload_down"), "new client"),
    Column("sends", _cost("payload_up"), "new client"),
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
    return tabulated([column._replace(above="") for column in columns], by_block(comparison, comparison.labels))


def by_block(comparison: RunComparison, titles: Mapping[str, str]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each block, after its title."""
    return [(titles[block], [comparison.rows[i] for i in members]) for block, members in comparison.blocks.items()]


def text_title(comparison: RunComparison) -> str:
    """Return the title of :func:`terminal_table`."""
    return f"Results for each client (test {comparison.headline.heading}, {spread_note(comparison)})"


def choice_table(comparison: RunComparison) -> Table:
    """Return each method's setting chosen on validation, with its test results."""

    def name(choice: Choice) -> str:
        return _narrow(choice.row.method, *choice.row.details, *(f"({edge_note([key])})" for key in choice.edges))

    columns = [Column("chosen on validation", name), *choice_columns(comparison, "second", "{}")]
    return tabulated(columns, [("", comparison.chosen)])


def choice_columns(comparison: RunComparison, second: str, test: str) -> list[Column[Choice]]:
    """Return the columns of the results of chosen settings, under these headings of the runner-up and of a group."""

    def tested(group: str, choice: Choice) -> str:
        return comparison.shown(choice.row.over_seeds(group))

    return [
        Column("of", lambda choice: str(choice.candidates)),
        Column("validation", lambda choice: comparison.shown(MeanStd(choice.validation, None))),
        Column(second, lambda choice: comparison.shown(MeanStd(choice.runner_up, None))),
        *(Column(test.format(group), partial(tested, group)) for group in comparison.groups),
    ]


def own_steps_table(
    rows: Sequence[Row], heading: str, display: Callable[[MeanStd | None], str], **options: Any
) -> Table:
    """Return a table of results after an unseen client's own steps."""

    def column(k: int) -> Column[Row]:
        return Column(str(k), lambda row: display(row.own_steps.get(k)))

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
    caption = f"Test {comparison.headline.title}" + (" in percent" if comparison.headline.percent else "")
    return as_latex(
        tabulated(columns, [("", comparison.rows)], text_columns=1 + several),
        f"{caption}, mean over clients, {spread_note(comparison)}. {marks_note(comparison)}",
    )


def edge_note(keys: Sequence[str]) -> str:
    """Return a note if chosen values are at the edge of the values tried."""
    return f"{', '.join(key.rpartition('.')[2] for key in keys)} at the edge of its grid"


def spread_note(comparison: RunComparison) -> str:
    """Return a note that explains ±."""
    return "± over seeds" if comparison.several_seeds else "± over clients"


def marks_note(comparison: RunComparison, tied: str = "underlined") -> str:
    """Return a note that explains the marks of a table; ``tied`` is the style of tied rows."""
    units = {"clients": "the clients of one seed", "seeds": "seeds"}.get(comparison.tested_over, "seeds or clients")
    return (
        f"Bold: best. {tied.capitalize()}: not significantly different from "
        f"{reference_note(comparison)}, by a paired test over {units} with Holm's correction over "
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


def row_records(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return every statistic of each row: fractions, not percent, in full precision, None if unknown.

    ``_std`` is over seeds; ``_over_clients`` is the mean over seeds of the standard deviation over clients.
    """
    groups = tuple(dict.fromkeys((*comparison.groups, *GROUPS)))
    marks = {group: comparison.marks(group) for group in groups}
    records = []
    for i, row in enumerate(comparison.rows):
        run = row.runs[0]
        record: dict[str, Any] = {
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
            "runs": " ".join(run.name for run in row.runs),
        }
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
        if any(run.privacy is not None for run in comparison.runs):
            record["epsilon"] = row.epsilon()
        records.append(record | _with_std("duration_s", row.of_runs("duration_s")))
    return records


def rows_as_csv(comparison: RunComparison) -> str:
    """Return :func:`row_records` as CSV lines, empty if unknown."""
    return records_as_csv(row_records(comparison))


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


def pair_records(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return the comparison of each pair of rows of a block and group of clients."""
    return [_pair_record(comparison, pair) for pair in comparison.pairs]


def pairs_as_csv(comparison: RunComparison) -> str:
    """Return :func:`pair_records` as CSV lines."""
    return records_as_csv(pair_records(comparison))


def _pair_record(comparison: RunComparison, pair: Pair) -> dict[str, Any]:
    rows, block = comparison.rows, comparison.rows[pair.first].block
    intervals = [*(pair.interval or (None, None)), *(pair.bootstrap or (None, None))]
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
        **dict(zip(("t_low", "t_high", "bootstrap_low", "bootstrap_high"), intervals, strict=True)),
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


NAMED = 3
"""Maximum number of rows that a sentence lists by name; more are counted."""


class Finding(NamedTuple):
    """Best row of a block for a group of clients, and the other rows in order of their means.

    ``close`` rows are not significantly worse than the best, ``untested`` ones not measured on the same clients.
    ``pair`` compares the best row with its ``rival``, with corrected ``p``; None if it was not tested. The rival is the
    second best row; or the reference, if another row than the best was named as that (``only_reference``), since only
    differences to it are tested then. ``too_few`` is the number of clients, if they are too few for any difference to
    be significant.
    """

    block: str
    group: str
    best: Row
    others: tuple[Row, ...]
    close: tuple[Row, ...]
    untested: tuple[Row, ...]
    rival: Row
    only_reference: bool
    pair: Pair | None
    p: float | None
    too_few: int | None

    @property
    def winner(self) -> Row | None:
        """Best row, if it is significantly better than every other row of its block."""
        return None if self.close or self.untested or self.only_reference else self.best


def findings(comparison: RunComparison) -> Iterator[Finding]:
    """Yield the finding of each block and group of clients that has two rows with results, unseen clients first.

    p-values are those of the tables (:meth:`RunComparison.p`). If models are made for user 0, results of other clients
    are not compared.
    """
    groups = (USERS,) if USERS in comparison.groups else tuple(reversed(comparison.groups))
    for block, members in comparison.blocks.items():
        for group in groups:
            best = comparison.best(members, group)
            if best:
                yield _finding(comparison, block, group, best[0])


def _finding(comparison: RunComparison, block: str, group: str, best: int) -> Finding:
    rows, sign = comparison.rows, comparison.headline.sign
    measured_rows = [i for i in comparison.blocks[block] if i != best and rows[i].over_seeds(group) is not None]
    others = sorted(measured_rows, key=lambda i: -sign * rows[i].mean(group))
    pairs, reference = comparison.pairs_of(best, group), comparison.references[block].row
    only_reference = comparison.against is not None and reference != best
    rival = reference if only_reference and reference in others else others[0]
    p = {i: comparison.p(pair) for i, pair in pairs.items()}
    clients = max((pair.clients for pair in pairs.values() if pair.over == "clients"), default=0)
    test_count = sum(pair.group == group and comparison.p(pair) is not None for pair in comparison.pairs)
    return Finding(
        block,
        group,
        rows[best],
        tuple(rows[i] for i in others),
        tuple(rows[i] for i in others if (p.get(i) or 0.0) >= LEVEL),
        tuple(rows[i] for i in others if i not in p),
        rows[rival],
        only_reference,
        pairs.get(rival),
        p.get(rival),
        clients if clients and test_count * least_p(clients) >= LEVEL else None,
    )


def sentence(comparison: RunComparison, finding: Finding) -> str:
    """Return a finding in words: the winner if there is one, its lead, interval and seeds."""
    title = comparison.title(finding.block)
    whom = GROUP_NAMES[finding.group].capitalize() + (f" ({title})" if title else "")
    result = f"{comparison.shown(finding.best.over_seeds(finding.group))}{comparison.headline.unit}"
    lead = _lead(comparison, finding)
    if finding.group == USERS:
        return f"{whom}: {finding.best.label} is best ({result}), {lead}. There is no test, as user 0 is one client."
    if finding.winner:
        return f"{whom}: {finding.best.label} wins with {result}, {lead}."
    mean = f"{comparison.headline.superlative} mean"
    if finding.only_reference:
        text = f"{whom}: {finding.best.label} has the {mean} ({result}), {lead}."
        return f"{text} Only differences to {comparison.against} are tested."
    text = f"{whom}: no clear winner. {finding.best.label} has the {mean} ({result}), {lead}."
    if finding.too_few is not None:
        text += f" With {pluralize(finding.too_few, 'client')}, no difference can be significant."
    elif finding.close == finding.others:
        text += " No other row is significantly worse." if len(finding.others) > 1 else ""
    elif finding.close:
        text += f" Not significantly worse: {_listed(finding.close)}."
    if finding.untested:
        text += f" Not measured on the same clients: {_listed(finding.untested)}."
    return text


def _lead(comparison: RunComparison, finding: Finding) -> str:
    """Return the distance to the rival, with its interval, seeds and p-value."""
    pair = finding.pair
    difference = finding.best.mean(finding.group) - finding.rival.mean(finding.group)
    if pair is not None and pair.mean is not None:
        difference = pair.mean
    text = f"level with {finding.rival.label}"
    if difference:
        points = " points" if comparison.headline.percent else ""
        amount = comparison.headline.shown_difference(abs(difference)).lstrip("+")
        text = f"{amount}{points} {'above' if difference > 0 else 'below'} {finding.rival.label}"
    return text if pair is None or finding.p is None else f"{text} ({_evidence(comparison, pair, finding.p)})"


def _evidence(comparison: RunComparison, pair: Pair, p: float) -> str:
    """Return the interval of a difference, the number of seeds or clients, and the p-value."""
    low, high = map(comparison.headline.shown_difference, pair.ends)
    seeds = f"{len(pair.seeds)} seeds" if len(pair.seeds) > 1 else f"1 seed, {pluralize(pair.clients, 'client')}"
    p_text = "< 0.001" if p < 0.001 else f"= {p:.2g}"
    return (
        f"95 % interval {low} to {high}; {seeds}; p {p_text}, by Holm's correction over {comparison.family(pair.group)}"
    )


def caution(comparison: RunComparison) -> str:
    """Return a caveat about tests over the clients of one seed; empty for other tests."""
    if {pair.over for pair in comparison.pairs if pair.p is not None} != {"clients"}:
        return ""
    return "With one seed this holds for these clients after this training; only more seeds show whether it repeats."


def _listed(rows: tuple[Row, ...]) -> str:
    return f"{len(rows)} rows" if len(rows) > NAMED else "; ".join(row.label for row in rows)
