"""Page of a comparison and its files: ``compare.html``, CSV, LaTeX and figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.home import expanded
from fedloom.core.words import pluralize
from fedloom.errors import ExperimentError, StorageError, argument
from fedloom.reporting.compare import COLOURS, FEATURED, GROUP_NAMES, LEVEL, Choice, RunComparison
from fedloom.reporting.compare_tables import (
    COST_COLUMNS,
    LABEL,
    SEEDS,
    by_block,
    caution,
    choice_columns,
    edge_note,
    findings,
    group_columns,
    latex_table,
    marks_note,
    own_steps_as_csv,
    own_steps_table,
    pairs_as_csv,
    reference_note,
    rows_as_csv,
    sentence,
    value_cell,
)
from fedloom.reporting.page import (
    DASH,
    Cell,
    Column,
    Fact,
    Lead,
    PageSection,
    Panel,
    Part,
    ReportPage,
    Table,
    check_installed,
    tabulated,
)
from fedloom.reporting.run_results import GROUPS, USERS, MeanStd, Row, RunResults, shown_value
from fedloom.reporting.significance import Pair
from fedloom.reporting.words import human_bytes, human_time, shown_epsilon
from fedloom.tasks.names import ACCURACY, MODEL_LOSS

if TYPE_CHECKING:
    from fedloom.reporting.drawing import Drawing

PAGE = "compare.html"

NAMED = 6
"""Maximum number of methods that the title lists by name; more are counted."""

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


def check_out(out: Path) -> None:
    """Raise :class:`ExperimentError` unless ``out`` is a new folder, or an earlier comparison's."""
    if out.exists() and not (out / PAGE).is_file():
        raise ExperimentError(
            f"{argument('out')} must be a new folder, or one with a {PAGE} to replace (got {out}).",
            key="out",
            found=out,
        )


def write_comparison(comparison: RunComparison, out: str | Path) -> Path:
    """Write ``compare.html``, tables and figures to a folder (docs/evaluation.md); return the page's path.

    The folder is written atomically and replaces an earlier comparison. The same runs give the same bytes.

    Raise ExperimentError if a package is not installed, or ``out`` is not a comparison; StorageError if it cannot be
    written.
    """
    out = expanded(out)
    check_out(out)
    check_installed("matplotlib", "jinja2", extra="compare")
    page = page_of(comparison)
    files = {
        PAGE: page.render(),
        "compare.csv": rows_as_csv(comparison),
        "compare.tex": latex_table(comparison),
        "pairs.csv": pairs_as_csv(comparison),
        **({"own_steps.csv": own_steps_as_csv(comparison)} if comparison.stepping else {}),
        **{f"figures/{name}": svg for name, svg in page.figures().items()},
    }
    with _replacing(out) as folder:
        (folder / "figures").mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return out / PAGE


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``out`` once it is complete."""
    part, old = (out.absolute().with_name(f".{out.name}.{os.getpid()}.{suffix}") for suffix in ("partial", "old"))
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


def page_of(comparison: RunComparison) -> ReportPage:
    """Return the page: which method is best, the best results, and the sections."""
    leads, facts = [], []
    for finding in findings(comparison):
        winner = finding.winner.label if finding.winner else ""
        data = {"group": finding.group, "best": finding.best.label, "winner": winner}
        leads.append(Lead(sentence(comparison, finding), data))
        label, best = finding.best.label, value_cell(comparison, finding.best, finding.group)
        if len(comparison.blocks) == 1:
            colour = comparison.styles[label].name if label in comparison.styles else ""
            is_best = finding.winner or finding.group == USERS
            name = f"{'best' if is_best else f'{comparison.headline.superlative} mean'}, {GROUP_NAMES[finding.group]}"
            facts.append(Fact(name, f"{best}{comparison.headline.unit}", label, colour))
    if note := caution(comparison):
        leads.append(Lead(note, {}))
    runs = comparison.runs
    datasets, models = (", ".join(dict.fromkeys(getattr(run, field) for run in runs)) for field in ("dataset", "model"))
    seeds = sorted({run.seed for run in runs})
    description = [
        datasets,
        models,
        pluralize(len(runs), "run"),
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
    ]
    return ReportPage(
        _title(comparison),
        (" · ".join(description),),
        sections(comparison),
        COLOURS,
        leads=tuple(leads),
        notices=comparison.notices,
        facts={"best": tuple(facts)},
        broad=True,
    )


def _title(comparison: RunComparison) -> str:
    names = list(dict.fromkeys(row.method for row in comparison.rows))
    if len(names) > NAMED:
        return f"Comparison of {pluralize(len({row.runs[0].method for row in comparison.rows}), 'method')}"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def sections(comparison: RunComparison) -> tuple[PageSection, ...]:
    """Return the sections that have content."""
    from fedloom.reporting import compare_figures as draw

    headline, metric = comparison.headline, comparison.headline.title
    better, worse = ("right", "left") if headline.higher_is_better else ("left", "right")
    figures = partial(_figures, comparison, comparison.featured)
    curves = (
        f"Mean test {metric} over clients. Lines are means over seeds; with several seeds, bands are ± one standard "
        "deviation. A method without rounds is a horizontal line. An untrained model may lie outside the figure."
        + (" Communication: payload of all clients, both directions." if len(comparison.rows) > 1 else "")
    )
    clients = f"Share of clients whose test {metric} in the last round is at or below each value: {better} is better."
    pairs = (
        f"Each client's {metric} minus its {metric} under the method with the {headline.superlative} mean, sorted. "
        f"Clients to the {worse} of the point where a line crosses zero are better served by that method."
    )
    content: dict[str, tuple[Part, ...]] = {
        "Results": (_results(comparison), _costs(comparison)),
        "New clients after local steps": _own_steps(comparison),
        "Learning curves": (*figures(headline.name, draw.draw_curves, curves, draw.has_curves),),
        "Distribution over clients": figures("clients", draw.draw_clients, clients),
        "Paired comparison, client by client": (
            *figures("pairs", draw.draw_pairs, pairs, lambda rows: bool(draw.paired_differences(rows))),
            *_pairs(comparison),
        ),
        "Validation": (_validation(comparison), *_chosen(comparison)),
        "Privacy": _privacy(comparison),
        "Settings that differ": (_settings(comparison),),
        "Runs": (_runs(comparison),),
    }
    return tuple(PageSection(title, parts) for title, parts in content.items() if parts)


def _figures(
    comparison: RunComparison,
    members: Mapping[str, Sequence[int]],
    name: str,
    draw: Callable[[Sequence[Row], Mapping[str, Any]], Drawing],
    text: str,
    applies: Callable[[Sequence[Row]], bool] = lambda rows: True,
    table: Callable[[Sequence[Row]], tuple[Table, ...]] = lambda rows: (),
) -> tuple[Part, ...]:
    """Return the figure of each block's ``members`` that have data for it, with one explanation below the last."""
    parts = []
    for number, (block, indices) in enumerate(members.items(), start=1):
        rows, title = [comparison.rows[i] for i in indices], comparison.title(block)
        if not comparison.groups or not applies(rows):
            continue
        omitted, row_count = "", len(comparison.blocks[block])
        if members is comparison.featured and len(rows) < row_count:
            own = ", and only clients' own models" if len(rows) > FEATURED else ""
            omitted = f"{len(rows)} of {row_count} rows: each method's setting chosen on validation{own}."
        panel = Panel(f"{name}-{number}" if title else name, draw(rows, comparison.styles), wide=True)
        parts.append(Part(title, (panel,), table(rows), text=omitted))
    return (*parts[:-1], replace(parts[-1], text=f"{text} {parts[-1].text}".rstrip())) if parts else ()


def _by_block(comparison: RunComparison, *columns: Column[Row]) -> Table:
    """Return a table row per row, in blocks that have titles if there are several."""
    titles = {block: comparison.title(block) for block in comparison.blocks}
    return tabulated(columns, by_block(comparison, titles), partial(_key, comparison))


def _key(comparison: RunComparison, row: Row) -> Mapping[str, str]:
    """Return the colour and dash pattern of a row that figures show."""
    featured = (comparison.rows[i] for i in comparison.featured[row.block])
    return comparison.styles[row.label].key if any(row is each for each in featured) else {}


def _results(comparison: RunComparison) -> Part:
    statistics = {"mean": "mean", "worst_decile": "worst decile", "pooled": "pooled", "other": "other reading"}
    others = {"unmasked" if row.runs[0].masked else "masked" for row in comparison.rows}
    if len(others) == 1:
        statistics["other"] = min(others)
    if comparison.headline != ACCURACY:  # statistics that some row has, no row having another reading
        groups = [group for group in comparison.groups if group != USERS]
        for key in ("worst_decile", "pooled", "other"):
            if all(row.over_seeds(group, key) is None for row in comparison.rows for group in groups):
                del statistics[key]
    headline = comparison.headline
    name = LABEL._replace(heading=f"test {headline.heading}")
    table = _by_block(comparison, name, SEEDS, *group_columns(comparison, statistics))
    units = "seeds" if comparison.several_seeds else "clients"
    sentences = [
        f"Last round. Mean over clients, each counting once; ± one standard deviation over {units}.",
        "Worst decile: mean of the worst tenth of clients.",
    ]
    if headline == MODEL_LOSS:
        sentences.append("The data have no classes: the loss is the model's own, and lower is better.")
    elif headline == ACCURACY:
        sentences.append(
            "Pooled: correct predictions over examples. Masked: only labels of the client's own training data can be "
            "predicted."
        )
    else:
        better = "higher" if headline.higher_is_better else "lower"
        sentences.append(f"Pooled: over all clients' examples together. For {headline.title}, {better} is better.")
    if USERS in comparison.groups:
        sentences.append("The model is made for user 0; the other columns cover all clients.")
    if len(comparison.rows) > 1:
        sentences.append(marks_note(comparison))
    return Part(tables=(table,), text=" ".join(sentences))


def _costs(comparison: RunComparison) -> Part:
    def mean(display: Callable[[float], str], value: MeanStd | None) -> str:
        return DASH if value is None else display(value.mean)

    def sent(purpose: str, row: Row) -> str:
        up, down = (row.of_runs(f"{purpose}_{way}") for way in ("up", "down"))
        return DASH if up is None or down is None else human_bytes(round(up.mean + down.mean))

    table = _by_block(
        comparison,
        LABEL._replace(heading="cost"),
        *COST_COLUMNS,
        Column("rounds", lambda row: mean("{:g}".format, row.training("round")), "training"),
        Column("payload", lambda row: sent("payload", row), "training"),
        Column("on the wire", lambda row: sent("wire", row), "training"),
        Column("client steps", lambda row: mean("{:,.0f}".format, row.training("client_steps")), "training"),
        Column("time", lambda row: mean(human_time, row.of_runs("duration_s")), "training"),
    )
    text = (
        "A new client: gradient steps, and bytes received and sent, for its first model. Training: all clients "
        "together, both directions, mean over seeds. Payload: tensor bytes as the papers count them, a copy for each "
        "client; on the wire: as measured, none in process. Time: whole run with evaluations."
    )
    return Part("Cost", tables=(table,), text=text)


def _own_steps(comparison: RunComparison) -> tuple[Part, ...]:
    """Return a figure and a table for each block with results after extra local steps (``evaluation.own_steps``)."""
    from fedloom.reporting.compare_figures import draw_own_steps

    def table(rows: Sequence[Row]) -> tuple[Table]:
        heading = f"local steps: test {comparison.headline.heading}"
        return (own_steps_table(rows, heading, comparison.shown, key=partial(_key, comparison)),)

    text = (
        f"Test {comparison.headline.title} of the unseen clients after each number of local steps, from the method's "
        "model; Local starts from a random one. Mean over clients"
        + (", ± one standard deviation over seeds." if comparison.several_seeds else ".")
    )
    return _figures(comparison, comparison.stepping, "own-steps", draw_own_steps, text, table=table)


def _pairs(comparison: RunComparison) -> tuple[Part, ...]:
    """Return a table of the featured rows compared with their block's reference; ``pairs.csv`` has all pairs."""
    blocks = list(_pair_blocks(comparison))
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
            *(TESTS[unit] for unit in comparison.tested_over.split(" or ")),
            "To test the differences to one method alone, name it in advance (against): that is a smaller family."
            if comparison.against is None and len(comparison.rows) > 2
            else "",
            "pairs.csv has all pairs.",
        ]
        text = " ".join(filter(None, sentences))
    display = comparison.headline.shown_difference

    def seeds(pair: Pair) -> str | Cell:
        return Cell(f"not comparable: {pair.why}", span=9) if comparison.p(pair) is None else str(len(pair.seeds))

    def p(pair: Pair) -> Cell:
        value = comparison.p(pair) or 0.0
        return Cell("< 0.001" if value < 0.001 else f"{value:.3f}", "best" if value < LEVEL else "")

    columns: list[Column[Pair]] = [
        Column("method", lambda pair: comparison.rows[pair.first].label),
        Column("seeds", seeds),
        Column("pairs", lambda pair: str(pair.clients)),
        Column("better", lambda pair: str(pair.better)),
        Column("equal", lambda pair: str(pair.clients - pair.better - pair.worse)),
        Column("worse", lambda pair: str(pair.worse)),
        Column("median", lambda pair: display(pair.median or 0.0)),
        Column("mean", lambda pair: display(pair.mean or 0.0)),
        Column("95 %", lambda pair: " to ".join(map(display, pair.ends))),
        Column("p (Holm)", p),
    ]
    return (Part(tables=(tabulated(columns, blocks),), text=text),)


def _pair_blocks(comparison: RunComparison) -> Iterator[tuple[str, list[Pair]]]:
    for group in (group for group in GROUPS if group in comparison.groups):
        for block, featured in comparison.featured.items():
            reference = comparison.references[block].row
            pairs = (pair for pair in comparison.pairs if pair.group == group and pair.has(reference))
            turned = [pair.seen_from(pair.first + pair.second - reference) for pair in pairs]
            if block_pairs := [pair for pair in turned if pair.first in featured]:
                caption = ", ".join(filter(None, (f"{group} clients", comparison.title(block))))
                yield f"{caption}; minus {comparison.rows[reference].label}", block_pairs


def _privacy(comparison: RunComparison) -> tuple[Part, ...]:
    """Return a table of the privacy of each row's training, and the claim of the first private one in sentences."""
    claims = [run.privacy for run in comparison.runs if run.privacy is not None]
    if not claims:
        return ()
    privacy = {id(row): row.runs[0].privacy or {} for row in comparison.rows}
    table = _by_block(
        comparison,
        LABEL,
        Column("unit", lambda row: privacy[id(row)].get("unit") or Cell("not private", span=6)),
        Column("ε", lambda row: shown_epsilon(row.epsilon())),
        Column("ε toward members", lambda row: shown_epsilon(row.epsilon("members"))),
        Column("ε toward the aggregator", lambda row: shown_epsilon(row.epsilon("aggregator"))),
        Column("δ", lambda row: f"{privacy[id(row)]['delta']:g}"),
        Column("noise from", lambda row: privacy[id(row)]["noise"]),
    )
    text = f"ε: the largest of the seeds, toward readers where no other is named. {' '.join(claims[0]['statement'])}"
    return (Part(tables=(table,), text=text),)


def _validation(comparison: RunComparison) -> Part:
    display, headline = comparison.shown, comparison.headline

    def best_round(row: Row) -> str:
        rounds = [DASH if result.best is None else str(result.best.round) for result in row.results]
        return ", ".join(rounds) if len(rounds) <= 4 else pluralize(len(set(rounds)), "round")

    def results(units: str, test: Callable[[Row, str], MeanStd | None], *, best: bool) -> Iterator[Column[Row]]:
        yield Column("validation", lambda row: display(row.validation(best=best)), units)
        for group in comparison.groups:
            name = GROUP_NAMES[USERS] if group == USERS else group
            yield Column(name, partial(lambda group, row: display(test(row, group)), group), units)

    last, by_validation = "last round", "best round by validation"
    table = _by_block(
        comparison,
        LABEL._replace(heading=headline.heading),
        *results(last, Row.over_seeds, best=False),
        Column("round", best_round, by_validation),
        *results(by_validation, Row.at_best, best=True),
    )
    text = (
        f"Validation: {'mean' if headline == MODEL_LOSS else 'pooled'} {headline.title} of the clients' own predictors "
        f"on the validation data of seen clients. The best round has the {headline.superlative} validation "
        f"{headline.title}, the earliest on ties. Test data do not choose it: the round with the best test "
        f"{headline.title} would flatter every method."
    )
    return Part("Last round, and best round by validation", tables=(table,), text=text)


def _chosen(comparison: RunComparison) -> tuple[Part, ...]:
    if not comparison.chosen:
        return ()
    blocks: dict[str, list[Choice]] = {}
    for choice in comparison.chosen:
        blocks.setdefault(comparison.title(choice.row.block), []).append(choice)
    total, *results = choice_columns(comparison, "second best", "test, {}")
    columns: list[Column[Choice]] = [
        Column("settings", lambda choice: choice.row.label),
        total,
        Column("seeds", lambda choice: ", ".join(map(str, choice.seeds))),
        *results,
        Column("note", lambda choice: edge_note(choice.edges) if choice.edges else ""),
    ]
    headline = comparison.headline
    text = (
        f"For each method, the setting with the {headline.superlative} validation {headline.title} in the last round, "
        "mean over the seeds that all its settings share. Test data were not used to choose it."
    )
    table = tabulated(columns, blocks.items(), lambda choice: _key(comparison, choice.row))
    return (Part("Chosen on validation", tables=(table,), text=text),)


def _settings(comparison: RunComparison) -> Part:
    if not comparison.differing:
        return Part(text="None: the runs differ only in their seeds.")
    methods: dict[tuple[str, str], list[Row]] = {}
    for row in comparison.rows:
        methods.setdefault((row.block, row.runs[0].method), []).append(row)

    def values(rows: Sequence[Row], key: str) -> str:
        different = dict.fromkeys(shown_value(row.settings[key]) for row in rows if key in row.settings)
        return ", ".join(different) or DASH

    columns: list[Column[str]] = [Column("key", str)]
    for (block, _), rows in methods.items():
        names, title = ", ".join(dict.fromkeys(row.method for row in rows)), comparison.title(block)
        columns.append(Column(f"{names} ({title})" if title else names, partial(values, rows)))
    text = "The row of a method states its other settings. A dash: the method has no such setting."
    return Part(tables=(tabulated(columns, [("", comparison.differing)]),), text=text)


def _runs(comparison: RunComparison) -> Part:
    labels = {run.path: row.label for row in reversed(comparison.rows) for run in row.runs}
    columns: list[Column[RunResults]] = [
        Column("run", lambda run: run.name),
        Column("settings", lambda run: labels[run.path]),
        Column("seed", lambda run: str(run.seed)),
        Column("partition", lambda run: run.partition[:12]),
        Column("time", lambda run: human_time(run.duration_s)),
        Column("torch", lambda run: str(run.environment.get("torch", DASH))),
        Column("device", lambda run: str(run.environment.get("device", DASH))),
    ]
    text = "Partition: first digits of its fingerprint. Clients of the same partition are paired."
    return Part(tables=(tabulated(columns, [("", comparison.runs)], text_columns=2),), text=text)
