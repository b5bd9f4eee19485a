"""Comparison report: ``compare.html`` as one self-contained page, CSV, LaTeX and figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import ExperimentError, StorageError, argument
from fedloom.reporting.compare import ACCURACY, DASH, FEATURED, LEVEL, Comparison, MeanStd, Pair, Row, shown_value
from fedloom.reporting.compare_tables import (
    GROUP_NAMES,
    Cell,
    as_latex,
    block_title,
    cost_cells,
    edge_note,
    own_steps_as_csv,
    own_steps_of,
    pairs_as_csv,
    plain,
    reach_note,
    reference_note,
    rows_as_csv,
    test_note,
    value_cell,
)
from fedloom.reporting.run_results import GROUPS, USERS
from fedloom.reporting.words import human_bytes
from fedloom.words import pluralize

if TYPE_CHECKING:
    from fedloom.reporting.compare_figures import Look

PAGE = "compare.html"

NAMED = 6
"""Maximum number of methods that sentences and the title list by name; more are counted."""

WHAT_THE_TEST_SAYS = {
    "clients": "There is one seed: a small p says that, of these clients under this one training, one method is better "
    "more often or by more than chance would have it. It says nothing of what training again would show, because the "
    "clients of a federation share its training: that takes several seeds.",
    "seeds": "The clients of a seed share its training, so each seed is one observation: its mean difference. A small "
    "p says that training again, with other seeds, would show the same; with two or three seeds only large and even "
    "differences have one.",
}
"""Explanation of the test by its unit of observation."""


@dataclass(frozen=True)
class Line:
    """Line of a table; ``look`` names its method's colour, and ``dash`` its line style in the figures (SVG)."""

    cells: tuple[Cell, ...]
    look: str = ""
    dash: str = ""


@dataclass(frozen=True)
class Table:
    """Table of the page: headings, headings of column groups above them, and lines in titled blocks."""

    headings: tuple[str, ...]
    blocks: tuple[tuple[str, tuple[Line, ...]], ...]
    above: tuple[tuple[str, int], ...] = ()
    left: int = 1
    """Number of text columns."""


@dataclass(frozen=True)
class Part:
    """Figure (with its file name) or table of the page, and its explanation."""

    title: str = ""
    figure: str = ""
    svg: str = ""
    table: Table | None = None
    text: str = ""


@dataclass(frozen=True)
class Section:
    """Section of the page."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Fact:
    """Best row of a group, for the top of the page."""

    label: str
    value: str
    note: str
    look: str


def check_out(out: Path) -> None:
    """Check that ``out`` is free for a comparison: a new folder, or an earlier comparison's.

    Raises
    ------
    ExperimentError
        If the folder holds anything else.
    """
    if out.exists() and not (out / PAGE).is_file():
        raise ExperimentError(
            f"{argument('out')} must be a new folder, or one with a {PAGE} to replace (got {out}).",
            key="out",
            found=out,
        )


def write_comparison(comparison: Comparison, out: str | Path) -> Path:
    """Write ``compare.html``, ``compare.csv``, ``pairs.csv``, ``compare.tex`` and ``figures/*.svg``.

    If extra local steps were evaluated, write ``own_steps.csv`` as well.

    The folder is written atomically and replaces an earlier comparison. The same runs give the same bytes.

    Returns
    -------
    Path
        Path of ``compare.html``.

    Raises
    ------
    ExperimentError
        If matplotlib or jinja2 is not installed, or ``out`` is not a comparison.
    StorageError
        If it cannot be written.
    """
    out = Path(out)
    check_out(out)
    try:
        import jinja2
        from markupsafe import Markup

        from fedloom.reporting import compare_figures, drawing
    except ModuleNotFoundError as error:
        raise ExperimentError(
            f"a comparison on paper needs the package {error.name}, which is not installed",
            hint=f"pip install 'fedloom[report]', or compare without {argument('out')}",
        ) from error

    sections = _sections(comparison)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedloom.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = lambda part: Markup(drawing.inline(part.svg, part.figure, compare_figures.COLOURS))
    page = environment.get_template("compare.html.j2").render(
        title=_title(comparison),
        subtitle=_subtitle(comparison),
        notices=comparison.notices,
        facts=_facts(comparison),
        sections=sections,
    )
    with _whole(out) as folder:
        (folder / "figures").mkdir()
        files = {PAGE: page, "compare.csv": rows_as_csv(comparison), "compare.tex": as_latex(comparison)}
        files["pairs.csv"] = pairs_as_csv(comparison)
        if comparison.stepping:
            files["own_steps.csv"] = own_steps_as_csv(comparison)
        files |= {f"figures/{part.figure}.svg": part.svg for s in sections for part in s.parts if part.figure}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return out / PAGE


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
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


def _title(comparison: Comparison) -> str:
    names = list(dict.fromkeys(row.method for row in comparison.rows))
    if len(names) > NAMED:
        return f"{pluralize(len({row.runs[0].method for row in comparison.rows}), 'method')} compared"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _subtitle(comparison: Comparison) -> str:
    runs = {run.path: run for row in comparison.rows for run in row.runs}.values()
    parts = (", ".join(dict.fromkeys(getattr(run, what) for run in runs)) for what in ("dataset", "model"))
    seeds = sorted({run.seed for run in runs})
    return " · ".join(
        [*parts, pluralize(len(runs), "run"), f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"]
    )


def _facts(comparison: Comparison) -> list[Fact]:
    """Return the best rows of each group, if all rows are comparable."""
    from fedloom.reporting.compare_figures import best_of

    if len(comparison.blocks) > 1 or len(comparison.rows) < 2:
        return []
    looks = _looks(comparison)
    facts = []
    # If models are made for user 0, quality for other clients does not count.
    for group in (USERS,) if USERS in comparison.groups else comparison.groups:
        best = best_of(comparison.rows, group)
        if best is not None:
            tied = [r.label for r, m in zip(comparison.rows, comparison.marks(group), strict=True) if m == "tied"]
            others = "; ".join(tied) if len(tied) <= NAMED else f"{len(tied)} of the {len(comparison.rows) - 1} others"
            (reference,) = (comparison.rows[one.row] for one in comparison.references.values())
            whom = "it" if reference is best else reference.label
            note = f"{best.label}. " + (f"Not told from {whom}: {others}." if tied else "")
            look = looks[best.label].name if best.label in looks else ""
            value = f"{value_cell(comparison, best, group)} {comparison.scale.unit}".rstrip()
            facts.append(Fact(f"best, {GROUP_NAMES[group]}", value, note, look))
    return facts


def _sections(comparison: Comparison) -> list[Section]:
    sections = [
        Section("Results", (_results(comparison), _costs(comparison))),
        Section("New clients and their own steps", _own_steps(comparison)),
        Section("Learning curves", (*_figures(comparison, comparison.scale.name), *_figures(comparison, "training"))),
        Section("What training took", _figures(comparison, "spent")),
        Section("Distribution over clients", _figures(comparison, "clients")),
        Section("Paired comparison, client by client", (*_figures(comparison, "pairs"), *_pairs(comparison))),
        Section("Validation", (_validation(comparison), *_chosen(comparison))),
        Section("Settings that differ", (_settings(comparison),)),
        Section("Runs", (_runs(comparison),)),
    ]
    return [section for section in sections if section.parts]


def _results(comparison: Comparison) -> Part:
    by_accuracy = comparison.scale is ACCURACY
    columns = ("worst_decile", "pooled", "other") if by_accuracy else ("worst_decile",)
    marks = {(g, c): comparison.marks(g, c) for g in comparison.groups for c in ("mean", *columns)}

    def cells(i: int, row: Row) -> tuple[Cell, ...]:
        found = [Cell(row.label), Cell(str(len(row.seeds)))]
        for group in comparison.groups:
            found.append(Cell(value_cell(comparison, row, group), marks[group, "mean"][i]))
            for column in columns if group != USERS else ():
                found.append(Cell(plain(comparison, row.over_seeds(group, column)), marks[group, column][i]))
        return tuple(found)

    other = "unmasked" if all(row.runs[0].masked for row in comparison.rows) else "masked"
    if any(row.runs[0].masked for row in comparison.rows) and other == "masked":
        other = "other reading"
    names = ("mean", "worst decile", "pooled", other)[: 1 + len(columns)]
    groups = [(GROUP_NAMES[group], ("mean",) if group == USERS else names) for group in comparison.groups]
    headings = (f"test {comparison.scale.words}", "seeds", *(name for _, under in groups for name in under))
    over = "seeds" if comparison.several_seeds else "clients"
    text = (
        f"Last round. Mean over clients, each counting once; ± one standard deviation over {over}. Worst decile: mean "
        "of the worst tenth of clients. "
    )
    if by_accuracy:
        text += (
            "Pooled: right predictions over examples. Masked: only labels of the client's own training data can be "
            "predicted. "
        )
    else:
        text += "The data have no classes: the loss is the model's own, and less is better. "
    if USERS in comparison.groups:
        text += "User 0: the client that the model is made for; the others show how far it serves them. "
    if len(comparison.rows) > 1:
        text += (
            f"Bold: best of its column. Underlined: not told from {test_note(comparison)} "
            f"({100 * LEVEL:g} %, see “Paired comparison”)."
        )
    above = (("", 2), *((title, len(under)) for title, under in groups))
    return Part(table=Table(headings, _by_block(comparison, cells), above=above), text=text)


def _costs(comparison: Comparison) -> Part:
    def cells(i: int, row: Row) -> tuple[Cell, ...]:
        up, down, time = (row.of_runs(key) for key in ("payload_up", "payload_down", "duration_s"))
        wire_up, wire_down = row.of_runs("wire_up"), row.of_runs("wire_down")
        wire = DASH if wire_up is None or wire_down is None else human_bytes(round(wire_up.mean + wire_down.mean))
        steps, rounds = row.training("client_steps"), row.training("round")
        texts = [
            *cost_cells(row),
            DASH if rounds is None else f"{rounds.mean:g}",
            DASH if up is None or down is None else human_bytes(round(up.mean + down.mean)),
            wire,
            DASH if steps is None else f"{steps.mean:,.0f}",
            DASH if time is None else _clock(time.mean),
        ]
        return (Cell(row.label), *map(Cell, texts))

    headings = ("cost", "steps", "receives", "sends", "rounds", "payload", "on the wire", "client steps", "time")
    text = (
        "A new client: its own gradient steps, and the bytes it receives and sends, for its first model. Training: "
        "all clients together, both directions, mean over seeds; payload: tensor bytes as the papers count them, each "
        "client's copy on its own; the wire as measured, none in process. Time is that of the whole run, evaluations "
        "included."
    )
    table = Table(headings, _by_block(comparison, cells), above=(("", 1), ("a new client", 3), ("training", 5)))
    return Part(title="Cost", table=table, text=text)


def _figures(comparison: Comparison, name: str) -> tuple[Part, ...]:
    """Return the figure of each block; none if nothing was measured."""
    from fedloom.reporting import compare_figures, drawing

    if not comparison.groups:
        return ()
    best, side = ("highest", "right") if comparison.scale is ACCURACY else ("lowest", "left")
    over_training = (
        f"Mean test {comparison.scale.name} over clients; mean over seeds, band ± one standard deviation over them "
        "where there are several. A method without rounds is a level line. An untrained model may lie outside the "
        "figure." + (" Communication: payload of all clients, both directions." if len(comparison.rows) > 1 else "")
    )
    texts = {
        comparison.scale.name: over_training,
        "training": "Each method's own loss, mean over the cohort of each round and over seeds: what is minimized "
        f"differs between methods. Beyond {drawing.MANY_ROUNDS} rounds, a point is the mean of neighbours.",
        "spent": f"Test {comparison.scale.name} in the last round against what training took: payload of all clients, "
        "both directions, and client steps. Bars are ± one standard deviation over seeds.",
        "clients": f"Share of the clients whose test {comparison.scale.name} in the last round is at or below a value: "
        f"{side} is better.",
        "pairs": f"Each client's {comparison.scale.name} less what it has under the method of {best} mean, sorted. "
        + (
            "Left of where a line reaches zero are the clients whom the best on average serves better."
            if comparison.scale is ACCURACY
            else "Right of where a line reaches zero are the clients whom the best on average serves better."
        ),
    }
    draw = {
        comparison.scale.name: compare_figures.curves,
        "spent": compare_figures.spent,
        "clients": compare_figures.clients,
        "training": compare_figures.training_loss,
        "pairs": compare_figures.pairs,
    }[name]
    looks, file = _looks(comparison), "training-loss" if name == "training" else name
    parts = []
    for number, (block, featured) in enumerate(comparison.featured.items(), start=1):
        rows = [comparison.rows[i] for i in featured]
        if name == "pairs" and not compare_figures.has_pairs(rows):
            continue
        if name == "training" and not any(row.training_loss for row in rows):
            continue
        if name == "spent" and len(rows) <= FEATURED:  # few rows: their curves show both costs
            continue
        several = len(comparison.blocks) > 1
        text = ""
        if len(featured) < len(comparison.blocks[block]):
            text = (
                f"Shown are {len(featured)} of {len(comparison.blocks[block])} rows: of each method the settings that "
                "validation chooses" + (", and clients' own models alone." if len(featured) > FEATURED else ".")
            )
        title = block_title(comparison, block) if several else ""
        parts.append(Part(title, f"{file}-{number}" if several else file, draw(rows, looks), text=text))
    if parts:  # one explanation for all, below the last
        parts[-1] = replace(parts[-1], text=f"{texts[name]} {parts[-1].text}".rstrip())
    return tuple(parts)


def _own_steps(comparison: Comparison) -> tuple[Part, ...]:
    """Return a figure and a table for each block with results after extra local steps (``evaluation.own_steps``)."""
    from fedloom.reporting import compare_figures

    looks, parts = _looks(comparison), []
    several = len(comparison.blocks) > 1
    for number, (block, members) in enumerate(comparison.stepping.items(), start=1):
        rows = [comparison.rows[i] for i in members]
        title = block_title(comparison, block) if several else ""
        file = f"own-steps-{number}" if several else "own-steps"
        parts.append(Part(title, file, compare_figures.own_steps(rows, looks)))
        steps = own_steps_of(rows)
        shown = comparison.scale.shown
        lines = tuple(
            Line((Cell(row.label), *(Cell(shown(row.own_steps.get(k))) for k in steps)), looks[row.label].name)
            for row in rows
        )
        headings = (f"steps of its own: test {comparison.scale.words}", *map(str, steps))
        parts.append(Part(table=Table(headings, (("", lines),)), text=""))
    if parts:
        text = (
            f"Test {comparison.scale.name} of the unseen clients after so many steps of local training, from the model "
            "that the method hands them; Local starts at random. Mean over clients"
            + (", ± one standard deviation over seeds." if comparison.several_seeds else ".")
        )
        parts[-1] = replace(parts[-1], text=text)
    return tuple(parts)


def _pairs(comparison: Comparison) -> tuple[Part, ...]:
    """Return a table of the featured rows compared with their block's reference; ``pairs.csv`` has all pairs."""
    blocks: list[tuple[str, list[Line]]] = []
    tested = {group: sum(p.group == group and p.p_against is not None for p in comparison.pairs) for group in GROUPS}
    for group in (group for group in GROUPS if group in comparison.groups):
        for block, featured in comparison.featured.items():
            reference = comparison.references[block].row
            pairs = [p.turned() if p.first == reference else p for p in comparison.pairs if p.group == group]
            lines = [Line(_pair_cells(comparison, p)) for p in pairs if p.second == reference and p.first in featured]
            title = f"{group} clients" + (f", {block_title(comparison, block)}" if len(comparison.blocks) > 1 else "")
            if lines:
                blocks.append((f"{title}; less: {comparison.rows[reference].label}", lines))
    if not blocks:
        return ()
    told_apart = any(pair.p_against is not None and pair.p_against < LEVEL for pair in comparison.pairs)
    text = (
        f"{comparison.scale.name.capitalize()} less that of {reference_note(comparison)}, for each client that both "
        "have. Mean: over seeds, of the mean over clients. 95 %: with several seeds Student's interval over them, with "
        "one a bootstrap over its clients. p: two-sided, with several seeds of a t test over their mean differences, "
        "with one of Wilcoxon's signed-rank test over its clients (equal pairs ranked as Pratt does), with Holm's "
        f"correction over the comparisons with the reference ({tested['seen']} seen, {tested['unseen']} unseen). "
        + " ".join(WHAT_THE_TEST_SAYS[over] for over in comparison.tested_over.split(" or "))
        + f" How clear a difference must be: {reach_note(comparison)}."
        + (
            ""
            if comparison.against
            else " Validation has chosen the reference, in the same trainings: a small p says that a method is not the "
            "best of these. That it is worse than the reference, it says if the reference was named beforehand "
            "(--against)."
        )
        + ("" if told_apart else " Nothing is told apart.")
        + " pairs.csv has all pairs."
    )
    if not any(tested.values()):
        text = "Only rows that were measured on the same clients can be compared client by client."
    headings = ("method", "seeds", "pairs", "better", "equal", "worse", "median", "mean", "95 %", "p (Holm)")
    return (Part(table=Table(headings, tuple((title, tuple(lines)) for title, lines in blocks)), text=text),)


def _pair_cells(comparison: Comparison, pair: Pair) -> tuple[Cell, ...]:
    name = Cell(comparison.rows[pair.first].label)
    if pair.median is None or pair.p_against is None:
        return (name, Cell(f"not comparable: {pair.why}", "wide"))
    equal = pair.clients - pair.better - pair.worse
    p = "< 0.001" if pair.p_against < 0.001 else f"{pair.p_against:.3f}"
    counts = (str(n) for n in (len(pair.seeds), pair.clients, pair.better, equal, pair.worse))
    shown, ends = comparison.scale.shown_difference, pair.interval or pair.bootstrap
    assert pair.mean is not None and ends is not None, "there are pairs"  # noqa: PT018
    return (
        name,
        *map(Cell, counts),
        Cell(shown(pair.median)),
        Cell(shown(pair.mean)),
        Cell(" to ".join(map(shown, ends))),
        Cell(p, "best" if pair.p_against < LEVEL else ""),
    )


def _validation(comparison: Comparison) -> Part:
    shown, groups = comparison.scale.shown, comparison.groups

    def cells(i: int, row: Row) -> tuple[Cell, ...]:
        rounds = ["–" if result.best is None else str(result.best.round) for result in row.results]
        last = [shown(row.over_seeds(group)) for group in groups]
        at_best = [shown(row.at_best(group)) for group in groups]
        said = ", ".join(rounds) if len(rounds) <= 4 else pluralize(len(set(rounds)), "round")
        texts = (shown(row.validation(best=False)), *last, said, shown(row.validation(best=True)), *at_best)
        return (Cell(row.label), *map(Cell, texts))

    names = ("validation", *(GROUP_NAMES[USERS] if group == USERS else group for group in groups))
    what, best = ("pooled accuracy", "highest") if comparison.scale is ACCURACY else ("mean loss", "lowest")
    text = (
        f"Validation: {what} of the clients' own predictors on the validation data of seen clients. The best round is "
        f"that of {best} validation {comparison.scale.name}, the earliest on ties; test data play no part in choosing "
        f"it. Reporting the round of best test {comparison.scale.name} would flatter every method; the last round and "
        "this one do not."
    )
    table = Table(
        (comparison.scale.words, *names, "round", *names),
        _by_block(comparison, cells),
        above=(("", 1), ("last round", len(names)), ("best round by validation", 1 + len(names))),
    )
    return Part("Last round, and best round by validation", table=table, text=text)


def _chosen(comparison: Comparison) -> tuple[Part, ...]:
    if not comparison.chosen:
        return ()
    looks, shown = _looks(comparison), comparison.scale.shown
    lines: dict[str, list[Line]] = {}
    for choice in comparison.chosen:
        row = comparison.rows[choice.row]
        texts = (
            str(choice.candidates),
            ", ".join(map(str, choice.seeds)),
            *(shown(MeanStd(value, None)) for value in (choice.validation, choice.runner_up)),
            *(shown(row.over_seeds(group)) for group in comparison.groups),
            edge_note(choice.edges) if choice.edges else "",
        )
        look = looks[row.label]
        title = block_title(comparison, row.block) if len(comparison.blocks) > 1 else ""
        lines.setdefault(title, []).append(Line((Cell(row.label), *map(Cell, texts)), look.name, look.svg_dash))
    best = "highest" if comparison.scale is ACCURACY else "lowest"
    text = (
        f"Of the settings a method was run with, the one of {best} validation {comparison.scale.name} in the last "
        f"round: mean over the seeds that all its settings have. Its test {comparison.scale.name} is shown, and had no "
        "part in the choice."
    )
    tests = (f"test, {group}" for group in comparison.groups)
    headings = ("settings", "of", "seeds", "validation", "second best", *tests, "note")
    table = Table(headings, tuple((title, tuple(found)) for title, found in lines.items()))
    return (Part("Chosen on validation", table=table, text=text),)


def _settings(comparison: Comparison) -> Part:
    """Return a table of the settings that differ, with a column per method."""
    if not comparison.differing:
        return Part(text="None: the runs differ in their seeds at most.")
    methods: dict[tuple[str, str], list[Row]] = {}
    for row in comparison.rows:
        methods.setdefault((row.block, row.runs[0].method), []).append(row)
    several = len(comparison.blocks) > 1
    headings = ["key"]
    for (block, _), rows in methods.items():
        names = ", ".join(dict.fromkeys(row.method for row in rows))
        headings.append(f"{names} ({block_title(comparison, block)})" if several else names)
    lines = []
    for key in comparison.differing:
        found = [[shown_value(r.settings[key]) for r in rows if key in r.settings] for rows in methods.values()]
        lines.append(Line((Cell(key), *(Cell(", ".join(dict.fromkeys(values)) or DASH) for values in found))))
    text = "What else a method was run with, its row says; a dash where it has no such setting."
    return Part(table=Table(tuple(headings), (("", tuple(lines)),)), text=text)


def _runs(comparison: Comparison) -> Part:
    lines: dict[Path, Line] = {}
    for row in comparison.rows:
        for run in row.runs:
            texts = (
                run.name,
                row.label,
                str(run.seed),
                run.partition[:12],
                _clock(run.duration_s),
                str(run.environment.get("torch", DASH)),
                str(run.environment.get("device", DASH)),
            )
            lines.setdefault(run.path, Line(tuple(map(Cell, texts))))
    headings = ("run", "settings", "seed", "partition", "time", "torch", "device")
    text = "Partition: first digits of its fingerprint. Clients are paired where it is the same."
    return Part(table=Table(headings, (("", tuple(lines.values())),), left=2), text=text)


def _by_block(
    comparison: Comparison, cells: Callable[[int, Row], tuple[Cell, ...]]
) -> tuple[tuple[str, tuple[Line, ...]], ...]:
    """Return a line per row, in blocks that have titles if there are several."""
    looks = _looks(comparison)
    blocks = []
    for block, members in comparison.blocks.items():
        lines = []
        for i in members:
            row = comparison.rows[i]
            look = looks.get(row.label) if i in comparison.featured[block] else None
            lines.append(Line(cells(i, row), look.name, look.svg_dash) if look else Line(cells(i, row)))
        blocks.append((block_title(comparison, block) if len(comparison.blocks) > 1 else "", tuple(lines)))
    return tuple(blocks)


def _looks(comparison: Comparison) -> dict[str, Look]:
    """Return the styles of the rows in figures."""
    from fedloom.reporting.compare_figures import looks

    return looks(comparison.rows[i].label for featured in comparison.featured.values() for i in featured)


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
