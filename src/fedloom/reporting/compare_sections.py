"""Sections of a comparison's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core.words import pluralize
from fedloom.reporting.compare import FEATURED, LEVEL, RunComparison
from fedloom.reporting.compare_findings import GROUP_NAMES
from fedloom.reporting.compare_rows import MeanStd, Row, own_steps_of, shown_value
from fedloom.reporting.compare_tables import cost_cells, edge_note, marks_note, mean_only, reference_note, value_cell
from fedloom.reporting.page import DASH, Cell, PageSection, Panel, Part, Table, TableRow, table_row
from fedloom.reporting.run_results import GROUPS, USERS
from fedloom.reporting.words import human_bytes, human_time, shown_epsilon
from fedloom.tasks.names import ACCURACY, MODEL_LOSS

if TYPE_CHECKING:
    from fedloom.reporting.compare_figures import LineStyle
    from fedloom.reporting.compare_pairs import Pair
    from fedloom.reporting.drawing import Drawing

TESTS = {
    "clients": "With one seed, the test is Wilcoxon's signed-rank test over its clients (equal pairs are ranked as "
    "Pratt does), and the interval is a bootstrap over them. A small p means that, among these clients after this "
    "training, one method is better more often or by a larger margin than chance explains. Only several seeds can show "
    "whether another training gives the same result, because the clients of a federation share one training.",
    "seeds": "With several seeds, the test is a t test over the seeds' mean differences, and the interval Student's. "
    "The clients of a seed share its training, so each seed is one observation. A small p means that training again "
    "with other seeds would probably give the same result. With two or three seeds, p is small only for large and "
    "consistent differences.",
}
"""Explanation of the test by its unit of observation."""


def line_styles_of(comparison: RunComparison) -> dict[str, LineStyle]:
    """Return the styles of the rows in figures, by label."""
    from fedloom.reporting.compare_figures import line_styles

    return line_styles(comparison.rows[i].label for featured in comparison.featured.values() for i in featured)


def sections(comparison: RunComparison) -> tuple[PageSection, ...]:
    """Return the sections that have content."""
    from fedloom.reporting import compare_figures as draw

    headline, metric = comparison.headline, comparison.headline.title
    better, worse = ("right", "left") if headline.higher_is_better else ("left", "right")
    figures = partial(_figures, comparison)
    curves = (
        f"Mean test {metric} over clients. Lines are means over seeds; with several seeds, bands are ± one standard "
        "deviation. A method without rounds is a horizontal line. An untrained model may lie outside the figure."
        + (" Communication: payload of all clients, both directions." if len(comparison.rows) > 1 else "")
    )
    losses = (
        "Each method's own loss, mean over the cohort of each round and over seeds. Methods minimize different losses. "
        "With many rounds, each point is the mean of adjacent rounds."
    )
    spent = (
        f"Test {metric} in the last round against the cost of training: payload of all clients, both directions, and "
        "client steps. Bars are ± one standard deviation over seeds."
    )
    clients = f"Share of clients whose test {metric} in the last round is at or below each value: {better} is better."
    pairs = (
        f"Each client's {metric} minus its {metric} under the method with the {headline.superlative} mean, sorted. "
        f"Clients to the {worse} of the point where a line crosses zero are better served by that method."
    )
    found = [
        PageSection("Results", (_results(comparison), _costs(comparison))),
        PageSection("New clients after local steps", _own_steps(comparison)),
        PageSection(
            "Learning curves",
            (
                *figures(headline.name, draw.draw_curves, curves, draw.has_curves),
                *figures("training-loss", draw.draw_training_losses, losses, draw.has_losses),
            ),
        ),
        PageSection("Cost of training", figures("spent", draw.draw_spent, spent, lambda rows: len(rows) > FEATURED)),
        PageSection("Distribution over clients", figures("clients", draw.draw_clients, clients)),
        PageSection(
            "Paired comparison, client by client",
            (*figures("pairs", draw.draw_pairs, pairs, draw.has_pairs), *_pairs(comparison)),
        ),
        PageSection("Validation", (_validation(comparison), *_chosen(comparison))),
        PageSection("Privacy", _privacy(comparison)),
        PageSection("Settings that differ", (_settings(comparison),)),
        PageSection("Runs", (_runs(comparison),)),
    ]
    return tuple(section for section in found if section.parts)


def _figures(
    comparison: RunComparison,
    name: str,
    draw: Callable[[Sequence[Row], Mapping[str, LineStyle]], Drawing],
    text: str,
    wanted: Callable[[Sequence[Row]], bool] = lambda rows: True,
) -> tuple[Part, ...]:
    """Return the figure of each block that has data for it, with one explanation below the last."""
    styles, parts = line_styles_of(comparison), []
    for number, (block, featured) in enumerate(comparison.featured.items(), start=1):
        rows, all_rows = [comparison.rows[i] for i in featured], len(comparison.blocks[block])
        if not comparison.groups or not wanted(rows):
            continue
        note = ""
        if len(rows) < all_rows:
            kept = ", and only clients' own models" if len(rows) > FEATURED else ""
            note = f"{len(rows)} of {all_rows} rows: each method's setting chosen on validation{kept}."
        title = comparison.title(block)
        file = f"{name}-{number}" if title else name
        parts.append(Part(title, (Panel(file, draw(rows, styles), wide=True),), text=note))
    return _with_text(parts, text)


def _with_text(parts: list[Part], text: str) -> tuple[Part, ...]:
    """Add an explanation to the last part."""
    return (*parts[:-1], replace(parts[-1], text=f"{text} {parts[-1].text}".rstrip())) if parts else ()


def _results(comparison: RunComparison) -> Part:
    columns = ("worst_decile", "pooled", "other") if comparison.headline == ACCURACY else _known_columns(comparison)
    marks = {(g, c): comparison.marks(g, c) for g in comparison.groups for c in ("mean", *columns)}

    def cells(i: int, row: Row) -> Sequence[str | Cell]:
        found: list[str | Cell] = [row.label, str(len(row.seeds))]
        for group in comparison.groups:
            found.append(Cell(value_cell(comparison, row, group), marks[group, "mean"][i]))
            for column in columns if group != USERS else ():
                found.append(Cell(mean_only(comparison, row.over_seeds(group, column)), marks[group, column][i]))
        return found

    titles = {"worst_decile": "worst decile", "pooled": "pooled", "other": _other_reading(comparison)}
    names = ("mean", *(titles[column] for column in columns))
    groups = [(GROUP_NAMES[group], ("mean",) if group == USERS else names) for group in comparison.groups]
    headings = (f"test {comparison.headline.heading}", "seeds", *(name for _, under in groups for name in under))
    above = (("", 2), *((title, len(under)) for title, under in groups))
    table = Table(headings, _by_block(comparison, cells), above=above)
    return Part(tables=(table,), text=_about_results(comparison))


def _known_columns(comparison: RunComparison) -> tuple[str, ...]:
    """Return the statistics besides the mean that some row has."""
    cells = [(row, group) for row in comparison.rows for group in comparison.groups if group != USERS]
    wanted = ("worst_decile", "pooled")
    return tuple(c for c in wanted if any(row.over_seeds(group, c) is not None for row, group in cells))


def _other_reading(comparison: RunComparison) -> str:
    others = {"unmasked" if row.runs[0].masked else "masked" for row in comparison.rows}
    return min(others) if len(others) == 1 else "other reading"


def _about_results(comparison: RunComparison) -> str:
    over = "seeds" if comparison.several_seeds else "clients"
    sentences = [
        f"Last round. Mean over clients, each counting once; ± one standard deviation over {over}.",
        "Worst decile: mean of the worst tenth of clients.",
        _about_metric(comparison),
    ]
    if USERS in comparison.groups:
        sentences.append("The model is made for user 0; the other columns cover all clients.")
    if len(comparison.rows) > 1:
        sentences.append(marks_note(comparison))
    return " ".join(sentences)


def _about_metric(comparison: RunComparison) -> str:
    headline = comparison.headline
    if headline == MODEL_LOSS:
        return "The data have no classes: the loss is the model's own, and lower is better."
    if headline == ACCURACY:
        return (
            "Pooled: correct predictions over examples. Masked: only labels of the client's own training data can be "
            "predicted."
        )
    better = "higher" if headline.higher_is_better else "lower"
    return f"Pooled: over all clients' examples together. For {headline.title}, {better} is better."


def _costs(comparison: RunComparison) -> Part:
    def cells(i: int, row: Row) -> Sequence[str | Cell]:
        steps, rounds, time = row.training("client_steps"), row.training("round"), row.of_runs("duration_s")
        return [
            row.label,
            *cost_cells(row),
            DASH if rounds is None else f"{rounds.mean:g}",
            _in_both_directions(row, "payload"),
            _in_both_directions(row, "wire"),
            DASH if steps is None else f"{steps.mean:,.0f}",
            DASH if time is None else human_time(time.mean),
        ]

    headings = ("cost", "steps", "receives", "sends", "rounds", "payload", "on the wire", "client steps", "time")
    text = (
        "A new client: gradient steps, and bytes received and sent, for its first model. Training: all clients "
        "together, both directions, mean over seeds. Payload: tensor bytes as the papers count them, a copy for each "
        "client; on the wire: as measured, none in process. Time: whole run with evaluations."
    )
    table = Table(headings, _by_block(comparison, cells), above=(("", 1), ("a new client", 3), ("training", 5)))
    return Part("Cost", tables=(table,), text=text)


def _in_both_directions(row: Row, what: str) -> str:
    up, down = (row.of_runs(f"{what}_{way}") for way in ("up", "down"))
    return DASH if up is None or down is None else human_bytes(round(up.mean + down.mean))


def _own_steps(comparison: RunComparison) -> tuple[Part, ...]:
    """Return a figure and a table for each block with results after extra local steps (``evaluation.own_steps``)."""
    from fedloom.reporting.compare_figures import draw_own_steps

    styles, parts = line_styles_of(comparison), []
    for number, (block, members) in enumerate(comparison.stepping.items(), start=1):
        rows, title = [comparison.rows[i] for i in members], comparison.title(block)
        steps = own_steps_of(rows)
        lines = tuple(
            table_row(
                row.label,
                *(comparison.shown(row.own_steps.get(k)) for k in steps),
                colour=styles[row.label].name,
                dash=styles[row.label].svg_dash,
            )
            for row in rows
        )
        table = Table((f"local steps: test {comparison.headline.heading}", *map(str, steps)), (("", lines),))
        file = f"own-steps-{number}" if title else "own-steps"
        parts.append(Part(title, (Panel(file, draw_own_steps(rows, styles), wide=True),), (table,)))
    text = (
        f"Test {comparison.headline.title} of the unseen clients after each number of local steps, from the method's "
        "model; Local starts from a random one. Mean over clients"
        + (", ± one standard deviation over seeds." if comparison.several_seeds else ".")
    )
    return _with_text(parts, text)


def _pairs(comparison: RunComparison) -> tuple[Part, ...]:
    """Return a table of the featured rows compared with their block's reference; ``pairs.csv`` has all pairs."""
    blocks = tuple(_pair_blocks(comparison))
    if not blocks:
        return ()
    if not any(comparison.p(pair) is not None for pair in comparison.pairs):
        text = "Only rows that were measured on the same clients can be compared client by client."
    else:
        sentences = [
            f"{comparison.headline.capitalized} minus that of {reference_note(comparison)}, over the clients "
            "that both have. Median: over clients. Mean: over seeds, of the mean over clients, with its 95 % interval. "
            "p: two-sided, with Holm's correction over "
            + " and ".join(f"{comparison.family(g)} for {g} clients" for g in GROUPS if g in comparison.groups)
            + ", here and in the findings.",
            *(TESTS[over] for over in comparison.tested_over.split(" or ")),
            "To test the differences to one method alone, name it in advance (against): that is a smaller family."
            if comparison.against is None and len(comparison.rows) > 2
            else "",
            "pairs.csv has all pairs.",
        ]
        text = " ".join(filter(None, sentences))
    headings = ("method", "seeds", "pairs", "better", "equal", "worse", "median", "mean", "95 %", "p (Holm)")
    return (Part(tables=(Table(headings, blocks),), text=text),)


def _pair_blocks(comparison: RunComparison) -> Iterator[tuple[str, tuple[TableRow, ...]]]:
    for group in (group for group in GROUPS if group in comparison.groups):
        for block, featured in comparison.featured.items():
            reference = comparison.references[block].row
            pairs = [p.turned() if p.first == reference else p for p in comparison.pairs if p.group == group]
            rows = [_pair_row(comparison, p) for p in pairs if p.second == reference and p.first in featured]
            if rows:
                about = ", ".join(filter(None, (f"{group} clients", comparison.title(block))))
                yield f"{about}; minus {comparison.rows[reference].label}", tuple(rows)


def _pair_row(comparison: RunComparison, pair: Pair) -> TableRow:
    name, ends, shown = (
        comparison.rows[pair.first].label,
        pair.interval or pair.bootstrap,
        comparison.headline.shown_difference,
    )
    p_value = comparison.p(pair)
    if pair.median is None or pair.mean is None or p_value is None or ends is None:
        return table_row(name, Cell(f"not comparable: {pair.why}", span=9))
    equal = pair.clients - pair.better - pair.worse
    p = "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"
    counts = (len(pair.seeds), pair.clients, pair.better, equal, pair.worse)
    differences = (shown(value) for value in (pair.median, pair.mean))
    interval = " to ".join(map(shown, ends))
    mark = "best" if p_value < LEVEL else ""
    return table_row(name, *map(str, counts), *differences, interval, Cell(p, mark))


def _privacy(comparison: RunComparison) -> tuple[Part, ...]:
    """Return a table of the privacy of each row's training, and the claim of the first private one in sentences."""
    claims = [run.privacy for row in comparison.rows for run in row.runs if run.privacy is not None]
    if not claims:
        return ()

    def cells(i: int, row: Row) -> Sequence[str | Cell]:
        claim = row.runs[0].privacy
        if claim is None:
            return (row.label, Cell("not private", span=6))
        shown = (shown_epsilon(row.epsilon_toward(whom)) for whom in ("readers", "members", "aggregator"))
        return (row.label, claim["unit"], *shown, f"{claim['delta']:g}", claim["noise"])

    headings = ("method", "unit", "ε", "ε toward members", "ε toward the aggregator", "δ", "noise from")
    text = f"ε: the largest of the seeds, toward readers where no other is named. {' '.join(claims[0]['statement'])}"
    return (Part(tables=(Table(headings, _by_block(comparison, cells)),), text=text),)


def _validation(comparison: RunComparison) -> Part:
    shown, groups, headline = comparison.shown, comparison.groups, comparison.headline
    metric = headline.title

    def cells(i: int, row: Row) -> Sequence[str | Cell]:
        rounds = [DASH if result.best is None else str(result.best.round) for result in row.results]
        last = [shown(row.over_seeds(group)) for group in groups]
        at_best = [shown(row.at_best(group)) for group in groups]
        which = ", ".join(rounds) if len(rounds) <= 4 else pluralize(len(set(rounds)), "round")
        return (row.label, shown(row.validation(best=False)), *last, which, shown(row.validation(best=True)), *at_best)

    names = ("validation", *(GROUP_NAMES[USERS] if group == USERS else group for group in groups))
    text = (
        f"Validation: {'mean' if headline == MODEL_LOSS else 'pooled'} {metric} of the clients' own predictors on the "
        f"validation data of seen clients. The best round has the {headline.superlative} validation {metric}, the "
        f"earliest on ties. Test data do not choose it: the round with the best test {metric} would flatter every "
        "method."
    )
    table = Table(
        (headline.heading, *names, "round", *names),
        _by_block(comparison, cells),
        above=(("", 1), ("last round", len(names)), ("best round by validation", 1 + len(names))),
    )
    return Part("Last round, and best round by validation", tables=(table,), text=text)


def _chosen(comparison: RunComparison) -> tuple[Part, ...]:
    if not comparison.chosen:
        return ()
    styles, shown, headline = line_styles_of(comparison), comparison.shown, comparison.headline
    lines: dict[str, list[TableRow]] = {}
    for choice in comparison.chosen:
        row = comparison.rows[choice.row]
        texts = (
            str(choice.candidates),
            ", ".join(map(str, choice.seeds)),
            *(shown(MeanStd(value, None)) for value in (choice.validation, choice.runner_up)),
            *(shown(row.over_seeds(group)) for group in comparison.groups),
            edge_note(choice.edges) if choice.edges else "",
        )
        style = styles[row.label]
        line = table_row(row.label, *texts, colour=style.name, dash=style.svg_dash)
        lines.setdefault(comparison.title(row.block), []).append(line)
    text = (
        f"For each method, the setting with the {headline.superlative} validation {headline.title} in the last round, "
        "mean over the seeds that all its settings share. Test data were not used to choose it."
    )
    headings = (
        "settings", "of", "seeds", "validation", "second best", *(f"test, {g}" for g in comparison.groups), "note"
    )  # fmt: skip
    table = Table(headings, tuple((title, tuple(found)) for title, found in lines.items()))
    return (Part("Chosen on validation", tables=(table,), text=text),)


def _settings(comparison: RunComparison) -> Part:
    if not comparison.differing:
        return Part(text="None: the runs differ only in their seeds.")
    methods: dict[tuple[str, str], list[Row]] = {}
    for row in comparison.rows:
        methods.setdefault((row.block, row.runs[0].method), []).append(row)
    headings = ["key"]
    for (block, _), rows in methods.items():
        names, title = ", ".join(dict.fromkeys(row.method for row in rows)), comparison.title(block)
        headings.append(f"{names} ({title})" if title else names)
    lines = []
    for key in comparison.differing:
        found = [[shown_value(r.settings[key]) for r in rows if key in r.settings] for rows in methods.values()]
        lines.append(table_row(key, *(", ".join(dict.fromkeys(values)) or DASH for values in found)))
    text = "The row of a method states its other settings. A dash: the method has no such setting."
    return Part(tables=(Table(tuple(headings), (("", tuple(lines)),)),), text=text)


def _runs(comparison: RunComparison) -> Part:
    lines: dict[Path, TableRow] = {}
    for row in comparison.rows:
        for run in row.runs:
            machine = (str(run.environment.get(key, DASH)) for key in ("torch", "device"))
            texts = (run.name, row.label, str(run.seed), run.partition[:12], human_time(run.duration_s), *machine)
            lines.setdefault(run.path, table_row(*texts))
    headings = ("run", "settings", "seed", "partition", "time", "torch", "device")
    text = "Partition: first digits of its fingerprint. Clients of the same partition are paired."
    return Part(tables=(Table(headings, (("", tuple(lines.values())),), left=2),), text=text)


def _by_block(
    comparison: RunComparison, cells: Callable[[int, Row], Sequence[str | Cell]]
) -> tuple[tuple[str, tuple[TableRow, ...]], ...]:
    """Return a table row per row, in blocks that have titles if there are several."""
    styles, blocks = line_styles_of(comparison), []
    for block, members in comparison.blocks.items():
        lines = []
        for i in members:
            style = styles.get(comparison.rows[i].label) if i in comparison.featured[block] else None
            key = {"colour": style.name, "dash": style.svg_dash} if style else {}
            lines.append(table_row(*cells(i, comparison.rows[i]), **key))
        blocks.append((comparison.title(block), tuple(lines)))
    return tuple(blocks)
