"""Tables of a comparison: cells for a terminal or a page, CSV, and LaTeX."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from fedloom.reporting.compare import (
    ACCURACY,
    DASH,
    LEVEL,
    Comparison,
    MeanStd,
    Pair,
    Row,
    differing,
    of_block,
    short_names,
    shown_value,
)
from fedloom.reporting.run_results import GROUPS, USERS
from fedloom.reporting.significance import clear_mean, least_p
from fedloom.reporting.words import human_bytes
from fedloom.words import as_csv

NARROW = 22
"""Width of the method column on a terminal, in characters."""

GROUP_NAMES = {USERS: "user 0", "seen": "seen clients", "unseen": "unseen clients"}
"""Names of the groups' columns."""


class Cell(NamedTuple):
    """Text of a table cell, and its mark: ``best`` of its column, ``tied`` with it, or none."""

    text: str
    mark: str = ""


def headings(comparison: Comparison) -> tuple[str, ...]:
    """Return the columns of :func:`as_text`: the groups with results, and the cost of a new client."""
    groups = [(GROUP_NAMES[g],) if g == USERS else (g, "worst decile") for g in comparison.groups]
    return ("what a client gets", *sum(groups, ()), "client steps", "receives", "sends")


def text_title(comparison: Comparison) -> str:
    """Return the title of :func:`as_text`."""
    return f"What each client would get (test {comparison.scale.words}, {spread_note(comparison)})"


def choice_headings(comparison: Comparison) -> tuple[str, ...]:
    """Return the columns of :func:`choices_as_text`."""
    return ("chosen on validation", "of", "validation", "second", *comparison.groups)


def as_text(comparison: Comparison) -> dict[str, list[tuple[Cell, ...]]]:
    """Return rows of cells under :func:`headings` for each block, by the block's title.

    Accuracies are in percent; :func:`spread_note` explains ±. Details are on separate lines.
    """
    values = _value_cells(comparison)
    return {
        block_title(comparison, block): [
            (
                Cell(_narrow(comparison.rows[i].method, *comparison.rows[i].details)),
                *values[i],
                *(Cell(text) for text in cost_cells(comparison.rows[i])),
            )
            for i in members
        ]
        for block, members in comparison.blocks.items()
    }


def choices_as_text(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return rows under :func:`choice_headings`: each method's setting chosen on validation, with its test results."""
    found, shown = [], comparison.scale.shown
    for choice in comparison.chosen:
        row = comparison.rows[choice.row]
        tests = [shown(row.over_seeds(group)) for group in comparison.groups]
        name = _narrow(row.method, *row.details, *(f"({edge_note([key])})" for key in choice.edges))
        validation = (shown(MeanStd(value, None)) for value in (choice.validation, choice.runner_up))
        found.append((name, str(choice.candidates), *validation, *tests))
    return found


def edge_note(keys: Sequence[str]) -> str:
    """Return a note that the chosen values are at the edge of the values tried."""
    return f"{', '.join(key.rpartition('.')[2] for key in keys)} at the edge of its grid"


def spread_note(comparison: Comparison) -> str:
    """Return a note that explains ±."""
    return "± over seeds" if comparison.several_seeds else "± over clients"


def test_note(comparison: Comparison) -> str:
    """Return a note on the reference and the test that compares other rows with it."""
    over = {
        "clients": "a paired test over the clients of one seed, which is about these clients under this one training",
        "seeds": "a paired test over seeds",
    }.get(comparison.tested_over, "a paired test over seeds, or over the clients where there is one seed")
    return f"{reference_note(comparison)}, by {over}"


def reference_note(comparison: Comparison) -> str:
    """Return the reference of the tests and the reason for it."""
    found = list(comparison.references.values())
    if len(found) > 1:
        return f"the row of its block that is {found[0].because}"
    return f"{comparison.rows[found[0].row].label} ({found[0].because})"


def reach_note(comparison: Comparison) -> str:
    """Return how clear a difference must be for significance, given the numbers of clients, seeds and comparisons."""
    found = []
    for group in GROUPS:
        tested = [pair for pair in comparison.pairs if pair.group == group and pair.p_against is not None]
        if not tested:
            continue
        m = len(tested)
        times = f"{m} comparisons" if m > 1 else "1 comparison"
        if (seeds := max(len(pair.seeds) for pair in tested)) > 1:
            reach = clear_mean(seeds, LEVEL / m)
            found.append(
                f"{group} clients: with {seeds} seeds and {times}, no difference is significant unless the mean of "
                f"the clearest one is at least {reach:.3g} times its standard deviation over seeds"
            )
        else:
            n = max(pair.clients for pair in tested)
            least = min(1.0, m * least_p(n))
            none = ": no difference can be significant" if least >= LEVEL else ""
            found.append(
                f"{group} clients of this one training: with {n} clients and {times}, the smallest p that can come "
                f"out, after correction, is {least:.2g}{none}"
            )
    return "; ".join(found)


def value_cell(comparison: Comparison, row: Row, group: str) -> str:
    """Return the mean test value ± its standard deviation: over seeds, or over clients if no row has several."""
    found = row.over_seeds(group)
    if found is None or comparison.several_seeds:
        return comparison.scale.shown(found)
    over_clients = None if group == USERS else row.over_seeds(group, "std")  # user 0 is one client
    return comparison.scale.shown(MeanStd(found.mean, None if over_clients is None else over_clients.mean))


def cost_cells(row: Row) -> tuple[str, str, str]:
    """Return a new client's cost: gradient steps, bytes received, bytes sent."""
    steps, down, up = row.new_client
    return DASH if steps is None else f"{steps:g}", _bytes(down), _bytes(up)


def block_title(comparison: Comparison, block: str) -> str:
    """Return the data set of a block, with the settings that distinguish the block from others."""
    first = {b: comparison.rows[members[0]] for b, members in comparison.blocks.items()}
    keys = differing([of_block(row.runs[0]) for row in first.values()])
    keys = tuple(key for key in keys if key != "data.dataset")
    row = first[block]
    told = [f"{n} {shown_value(row.settings[k])}" for k, n in short_names(keys).items() if k in row.settings]
    return ", ".join([row.runs[0].dataset, *told, *(["masked"] if row.runs[0].masked else [])])


def rows_as_csv(comparison: Comparison) -> str:
    """Return a CSV line per row with every statistic: fractions or losses in full precision, empty if unknown.

    ``_std`` is over seeds; ``_over_clients`` is the mean over seeds of the standard deviation over clients.
    """
    lines: list[dict[str, object]] = []
    name, groups = comparison.scale.name, tuple(dict.fromkeys((*comparison.groups, *GROUPS)))
    for i, row in enumerate(comparison.rows):
        run = row.runs[0]
        line: dict[str, object] = {
            "label": row.label,
            "method": row.method,
            "algorithm": run.algorithm,
            "predictor": row.predictor,
            "dataset": run.dataset,
            "model": run.model,
            "reading": "loss" if run.by_loss else "masked" if run.masked else "unmasked",
            **{key: shown_value(row.settings[key]) if key in row.settings else None for key in comparison.differing},
            "n_seeds": len(row.seeds),
            "seeds": " ".join(map(str, row.seeds)),
            "runs": " ".join(one.name for one in row.runs),
        }
        for group in groups:
            line |= _columns(f"{group}_{name}", row.over_seeds(group))
            line[f"{group}_{name}_over_clients"] = _first(row.over_seeds(group, "std"))
            line[f"{group}_clients"] = _first(row.over_seeds(group, "clients"))
            line |= _columns(f"{group}_worst_decile", row.over_seeds(group, "worst_decile"))
            if comparison.scale is ACCURACY:
                line |= _columns(f"{group}_pooled", row.over_seeds(group, "pooled"))
                line |= _columns(f"{group}_{'unmasked' if run.masked else 'masked'}", row.over_seeds(group, "other"))
            line[f"{group}_mark"] = comparison.marks(group)[i]
        line |= _columns("validation_last", row.validation(best=False))
        line |= _columns("validation_best", row.validation(best=True))
        line["best_rounds"] = " ".join("" if r.best is None else str(r.best.round) for r in row.results)
        for group in groups:
            line |= _columns(f"{group}_at_best", row.at_best(group))
        line |= {f"new_client_{key}": value for key, value in row.new_client._asdict().items()}
        line["rounds"] = _first(row.training("round"))
        line["client_steps"] = _first(row.training("client_steps"))
        line |= {key: _first(row.of_runs(key)) for key in ("payload_up", "payload_down", "wire_up", "wire_down")}
        line |= _columns("duration_s", row.of_runs("duration_s"))
        lines.append(line)
    # Rows of different readings have different columns: take all of them, in order of first use.
    keys = dict.fromkeys(key for line in lines for key in line)
    return as_csv([{key: _text(line.get(key)) for key in keys} for line in lines])


def pairs_as_csv(comparison: Comparison) -> str:
    """Return a CSV line for each pair of rows of a block and group of clients."""
    return as_csv(
        [
            {
                "group": pair.group,
                "first": comparison.rows[pair.first].label,
                "second": comparison.rows[pair.second].label,
                "data": block_title(comparison, comparison.rows[pair.first].block),
                "seeds": " ".join(map(str, pair.seeds)),
                "clients": str(pair.clients),
                "first_better": str(pair.better),
                "equal": str(pair.clients - pair.better - pair.worse),
                "second_better": str(pair.worse),
                "median_difference": _text(pair.median),
                "p": _text(pair.p),
                "p_holm": _text(pair.p_holm),
                "test_over": pair.over if pair.p is not None else "",
                "mean_difference": _text(pair.mean),
                **_ends("t", pair.interval),
                **_ends("bootstrap", pair.bootstrap),
                "p_of_seeds": " ".join(map(_text, pair.p_of_seeds)),
                "not_comparable": pair.why,
                "p_holm_against": _text(pair.p_against),
                "against": "" if pair.p_against is None else reference_of(comparison, pair).label,
            }
            for pair in comparison.pairs
        ]
    )


def reference_of(comparison: Comparison, pair: Pair) -> Row:
    """Return the reference row of a pair's block."""
    return comparison.rows[comparison.references[comparison.rows[pair.first].block].row]


def own_steps_of(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of extra local steps after which some row was evaluated."""
    return sorted({k for row in rows for k in row.own_steps})


def own_steps_as_csv(comparison: Comparison) -> str:
    """Return a CSV line for each row, seed and number of an unseen client's extra local steps: fractions, or losses."""
    lines = []
    for block, members in comparison.stepping.items():
        for i in members:
            row = comparison.rows[i]
            for run in row.runs:
                for k, group in run.own_steps.items():
                    lines.append(
                        {
                            "label": row.label,
                            "data": block_title(comparison, block),
                            "seed": str(run.seed),
                            "steps": str(k),
                            "clients": str(group.clients),
                            comparison.scale.name: _text(group.mean),
                            "worst_decile": _text(group.worst_decile),
                            "other_reading": _text(group.other),
                        }
                    )
    return as_csv(lines)


def own_steps_as_text(comparison: Comparison) -> list[str]:
    """Return for each block a table and a plot of unseen clients over extra local steps, in ASCII."""
    found = []
    for block, members in comparison.stepping.items():
        rows = [comparison.rows[i] for i in members]
        steps, letters = own_steps_of(rows), _letters([row.label for row in rows])
        width = max(7, min(9, (80 - NARROW - 5) // max(len(steps), 1)))
        title = f"A client never seen in training, after steps of its own (test {comparison.scale.words})"
        if len(comparison.blocks) > 1:
            title += f"\n{block_title(comparison, block)}"
        lines = [title, ""]
        lines += _plotted(rows, steps, letters, width)
        lines.append(f"{'steps':<{NARROW + 4}}" + "".join(f"{k:>{width}}" for k in steps))
        for row, letter in zip(rows, letters, strict=True):
            shown = [plain(comparison, row.own_steps[k]) if k in row.own_steps else "-" for k in steps]
            cells = "".join(f"{text:>{width}}" for text in shown)
            label = row.label if len(row.label) <= NARROW else row.label[: NARROW - 3] + "..."
            lines.append(f"{letter} {label:<{NARROW + 2}}{cells}")
        found.append("\n".join(lines))
    return found


PLOT_LINES = 12


def _plotted(rows: Sequence[Row], steps: Sequence[int], letters: Sequence[str], width: int) -> list[str]:
    """Return the plot's lines, with a letter for each row and number of steps; ``*`` where letters coincide."""
    values = [value.mean for row in rows for value in row.own_steps.values()]
    low, high = min(values), max(values)
    room = (high - low) or 1.0
    canvas = [[" "] * (width * len(steps)) for _ in range(PLOT_LINES)]
    for row, letter in zip(rows, letters, strict=True):
        for k, value in row.own_steps.items():
            y = round((high - value.mean) / room * (PLOT_LINES - 1))
            x = width * (steps.index(k) + 1) - 1
            canvas[y][x] = letter if canvas[y][x] in (" ", letter) else "*"
    scale = rows[0].scale
    shown = {0: high, PLOT_LINES // 2: high - room * (PLOT_LINES // 2) / (PLOT_LINES - 1), PLOT_LINES - 1: low}
    return [
        f"{scale.shown(MeanStd(shown[y], None)) if y in shown else '':>{NARROW + 2}} |{''.join(line)}".rstrip()
        for y, line in enumerate(canvas)
    ]


def _letters(labels: Sequence[str]) -> list[str]:
    """Return a letter for each label: its first letter that is not taken, or a digit if there is none."""
    found: list[str] = []
    for n, label in enumerate(labels, start=1):
        own = (c for c in label.upper() if c.isascii() and c.isalpha() and c not in found)
        found.append(next(own, str(n % 10)))
    return found


def as_latex(comparison: Comparison) -> str:
    r"""Return a ``table`` for a LaTeX document with the package ``booktabs``: best in bold, tied rows underlined."""
    values = _value_cells(comparison)
    spans = [(GROUP_NAMES[group], 1 if group == USERS else 2) for group in comparison.groups] + [("new client", 3)]
    columns = 2 + sum(span for _, span in spans)
    above, rules, at = "& ", "", 3
    for k, (name, span) in enumerate(spans):
        above += rf"& \multicolumn{{{span}}}{{c}}{{{name}}} "
        rules += rf"\cmidrule({'l' if k == len(spans) - 1 else 'lr'}){{{at}-{at + span - 1}}}"
        at += span
    means = ["mean" if group == USERS else "mean & worst decile" for group in comparison.groups]
    body = []
    for block, members in comparison.blocks.items():
        if len(comparison.blocks) > 1:
            title = escaped(block_title(comparison, block))
            body.append(rf"\midrule\multicolumn{{{columns}}}{{@{{}}l}}{{\emph{{{title}}}}} \\")
        body.append(r"\midrule")
        for i in members:
            row = comparison.rows[i]
            cells = [escaped(row.label), str(len(row.seeds)), *map(_latex, values[i])]
            cells += [escaped(text) for text in cost_cells(row)]
            body.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_caption(comparison)}}}",
            rf"\begin{{tabular}}{{@{{}}l{'r' * (columns - 1)}@{{}}}}",
            r"\toprule",
            rf"{above}\\",
            rules,
            " & ".join(["what a client gets & seeds", *means, r"steps & receives & sends \\"]),
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escaped(text: str) -> str:
    """Return a text with LaTeX's special characters escaped."""
    special = {
        **{c: rf"\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        "±": r"$\pm$",
        "–": "--",
    }
    return "".join(special.get(c, c) for c in text)


def _latex(cell: Cell) -> str:
    mean, plus_minus, std = cell.text.partition(" ± ")
    command = {"best": r"\textbf", "tied": r"\underline"}.get(cell.mark)
    shown = escaped(mean) if command is None else f"{command}{{{escaped(mean)}}}"
    return rf"{shown} $\pm$ {std}" if plus_minus else shown


def _caption(comparison: Comparison) -> str:
    what = "Test accuracy in percent" if comparison.scale is ACCURACY else "Test loss"
    return (
        f"{what}, mean over clients, {escaped(spread_note(comparison))}. Bold: best; underlined: not "
        f"told from {escaped(test_note(comparison))} (Holm's correction, "
        rf"{100 * LEVEL:g}\,\%)."
    )


def _value_cells(comparison: Comparison) -> list[list[Cell]]:
    """Return for each row the mean and worst decile of the groups with results; for user 0, only the mean."""
    cells: list[list[Cell]] = [[] for _ in comparison.rows]
    for group in comparison.groups:
        for row, mark, line in zip(comparison.rows, comparison.marks(group), cells, strict=True):
            line.append(Cell(value_cell(comparison, row, group), mark))
        if group == USERS:
            continue
        for row, mark, line in zip(comparison.rows, comparison.marks(group, "worst_decile"), cells, strict=True):
            line.append(Cell(plain(comparison, row.over_seeds(group, "worst_decile")), mark))
    return cells


def plain(comparison: Comparison, value: MeanStd | None) -> str:
    """Return a mean without its standard deviation, as the table shows it."""
    return comparison.scale.shown(None if value is None else MeanStd(value.mean, None))


def _narrow(method: str, *details: str) -> str:
    """Return a method and its details, wrapped to leave room for the other columns of a terminal."""
    wrap = textwrap.TextWrapper(NARROW, initial_indent="  ", subsequent_indent="    ")
    return "\n".join([method, *(line for detail in details for line in wrap.wrap(detail))])


def _columns(name: str, value: MeanStd | None) -> dict[str, object]:
    return {name: None if value is None else value.mean, f"{name}_std": None if value is None else value.std}


def _first(value: MeanStd | None) -> float | None:
    return None if value is None else value.mean


def _bytes(count: float | None) -> str:
    return human_bytes(None if count is None else round(count))


def _ends(name: str, interval: tuple[float, float] | None) -> dict[str, str]:
    low, high = interval or (None, None)
    return {f"{name}_low": _text(low), f"{name}_high": _text(high)}


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
