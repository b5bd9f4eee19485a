"""Report of a run: ``report.html``, one self-contained page made from the files of the run's folder."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import DataError, ExperimentError, StorageError
from fedloom.experiment.yaml_reader import parse
from fedloom.reporting import inputs
from fedloom.reporting.words import human_bytes, is_masked, method_title
from fedloom.runs.files import ABSENT, EXPERIMENT
from fedloom.runs.folder import RunFolder
from fedloom.words import pluralize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedloom.reporting.drawing import Drawing

DASH = "–"

NAMED = 10
"""Maximum number of rows of a small table."""

FEW_CLIENTS = 20
"""Maximum number of clients that are all listed by name."""

CARDS = 1000
"""Maximum number of clients for which each gets a card; every card adds half a kilobyte to the page."""

CARD_CLASSES = 12
"""Maximum number of classes in a card's confusion matrix: the most frequent ones."""


@dataclass(frozen=True)
class Row:
    """Line of a table.

    ``mark`` is the group whose colour it has, empty for a part of one; ``note`` is attached to the label.
    """

    label: str
    cells: tuple[str, ...]
    mark: str = ""
    note: str = ""


@dataclass(frozen=True)
class Block:
    """Lines of the results table with a common round and reading."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Fact:
    """Number at the top of the page."""

    label: str
    value: str
    note: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Panel:
    """Figure: the name of its file, its SVG, and whether it takes the full width of the page.

    ``points``: if its points are clients, the id of each and the text of its tooltip.
    """

    name: str
    svg: Drawing
    wide: bool = False
    points: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Table:
    """Small table among figures; ``wide`` if it takes the full width of the page."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    wide: bool = False


@dataclass(frozen=True)
class Card:
    """Card of a client: its data, the quality of its model, and its confusion matrix with a row per true class.

    ``target`` is the id of the card on the page. A row's cells are (examples, share of the class in percent).
    """

    client: str
    target: str
    mark: str
    note: str
    facts: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True)
class Section:
    """Section of the page with its parts in display order, or the reason why it is left out.

    ``panels`` and ``tables`` share a grid with this many ``columns`` across the page.
    """

    title: str
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    cards: tuple[Card, ...] = ()
    columns: int = 1
    blocks: tuple[Block, ...] = ()
    text: str = ""
    pairs: tuple[tuple[str, str], ...] = ()
    pre: str = ""
    absent: str = ""


@dataclass(frozen=True)
class AutoRefresh:
    """Automatic reload of the page of a run in progress: the interval in seconds, and the state of the run.

    ``every_s`` is None if the page will not be rewritten, because the run has ended.
    """

    every_s: int | None
    state: str


def write_report(run_folder: str | Path, renewal: AutoRefresh | None = None) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` from the other files of a run's folder.

    The same files give the same bytes. A section whose file is missing or damaged is replaced by a note, so that a run
    that was stopped, or is in progress, has a report too.

    Parameters
    ----------
    run_folder
        Folder of a run, finished or not.
    renewal
        For a followed run (:mod:`fedloom.reporting.follow`): the page states its progress, and omits sections whose
        files are written at the end.

    Returns
    -------
    Path
        Path of ``report.html``.

    Raises
    ------
    DataError
        If the folder is not a run.
    ExperimentError
        If matplotlib or jinja2 is not installed.
    StorageError
        If the report cannot be written.
    """
    run = RunFolder.open(run_folder)
    _check_installed("jinja2", "matplotlib")
    import jinja2

    sections, head = _sections(run), _head(run)
    if renewal is not None:
        later = [section.title for section in sections if section.absent.endswith(ABSENT)] if renewal.every_s else []
        sections = [section for section in sections if section.title not in later]
        said = f" When it has ended, this page will also have: {', '.join(later)}." if later else ""
        head = replace(head, notices=(f"{renewal.state}{said}", *head.notices[head.unfinished :]))
    targets = {card.client: card.target for section in sections for card in section.cards}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedloom.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    page = environment.get_template("report.html.j2").render(
        head=head, sections=sections, targets=targets, every_s=None if renewal is None else renewal.every_s
    )
    for panel in (panel for section in sections for panel in section.panels):
        _write(run.path / "figures" / f"{panel.name}.svg", _annotated(panel.svg, panel.points, {}))
    _write(run.path / "report.html", page)
    return run.path / "report.html"


def figures(run_folder: str | Path) -> dict[str, Figure]:
    """Return the figures of a run's report by name, as in ``figures/NAME.svg``.

    Raises
    ------
    DataError
        If the folder is not a run.
    ExperimentError
        If matplotlib is not installed.
    """
    run = RunFolder.open(run_folder)
    _check_installed("matplotlib")
    return {panel.name: panel.svg.figure for section in _sections(run) for panel in section.panels}


def _check_installed(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise ExperimentError(
                f"a report needs the package {package}, which is not installed", hint="pip install 'fedloom[report]'"
            )


def _sections(run: RunFolder) -> list[Section]:
    quality: dict[str, Callable[[RunFolder], Section]] = {"Learning curves": _curves, "Results": _results}
    if not _without_classes(run):  # without classes there is no accuracy
        quality |= {"Clients": _clients, "Confusion matrix": _confusion, "Calibration": _calibration}
    if (run.path / "descriptors.json").exists():  # only for methods with descriptors
        quality["Descriptors"] = _descriptors
    if (run.path / "uncertainty.json").exists():  # only for methods whose models are distributions
        quality["Uncertainty"] = _uncertainty
    if (run.path / "confusion.csv").exists():
        quality["Client by client"] = _one_client
    if _of_method(run):
        quality["Method"] = _method
    circumstances = {"Data": _partition, "Time": _phases, "Settings": _settings, "Environment": _environment}
    return [_section(title, run, build) for title, build in {**quality, **circumstances}.items()]


FILES: Mapping[str, Sequence[str]] = {
    "Learning curves": ("metrics.jsonl", "partition.json"),
    "Results": ("metrics.jsonl", "summary.json"),
    "Clients": ("clients.csv", "metrics.jsonl"),
    "Confusion matrix": ("confusion.json",),
    "Calibration": ("calibration.json", "metrics.jsonl", "summary.json"),
    "Descriptors": ("descriptors.json", "partition.json"),
    "Uncertainty": ("uncertainty.json", "clients.csv"),
    "Client by client": ("clients.csv", "metrics.jsonl", "confusion.csv", "partition.json"),
    "Time": ("journal.jsonl", "summary.json"),
}
"""Files of each section, except those that are validated when they are read."""


def _without_classes(run: RunFolder) -> bool:
    try:
        return run.manifest().classes == 0
    except DataError:
        return False


def _section(title: str, run: RunFolder, build: Callable[[RunFolder], Section]) -> Section:
    """Return a section, or a note on the damaged file; other errors are bugs and are raised."""
    try:
        try:
            return build(run)
        except inputs.OF_BROKEN_FILES:
            inputs.check(run, FILES.get(title, ()))
            raise
    except DataError as error:
        return Section(title, absent=_within(run, error))


def _within(run: RunFolder, error: DataError) -> str:
    """Return the message with paths relative to the run's folder, so that a report reveals nothing of its machine."""
    return str(error).replace(f"{run.path}/", "")


@dataclass(frozen=True)
class Head:
    """Top of the page: method, data, quality and cost."""

    title: str
    subtitle: str
    data: str
    notices: tuple[str, ...]
    unfinished: bool = False
    quality: tuple[Fact, ...] = ()
    cost: tuple[Fact, ...] = ()


def _head(run: RunFolder) -> Head:
    notices: list[str] = []
    try:
        lines = run.metrics()
        inputs.check(run, ("metrics.jsonl",))
        if lines.unreadable:
            notices.append(f"metrics.jsonl: {pluralize(lines.unreadable, 'unreadable line')} left out.")
        last = lines[-1] if lines else None
        if last is not None and any(last.get("left_out", {}).values()):
            missing = last["left_out"]
            notices.append(
                f"Not in the statistics of round {last['round']}: {pluralize(missing['absent'], 'client')} that did "
                f"not answer, {missing['untested']} without test examples."
            )
    except DataError:  # the sections that use this file report the fault
        last = None
    try:
        manifest = run.manifest()
        data = f"{len(manifest.roster)} seen and {pluralize(len(manifest.unseen), 'unseen client')}, scheme "
        data += f"{manifest.scheme.get('scheme', DASH)}, {_range([client.train for client in manifest.clients])} "
        data += "training examples each"
    except DataError:
        data = ""
    try:
        summary = inputs.checked(run, "summary.json")
        about = (str(summary["name"]), f"algorithm {summary['algorithm']}", f"model {summary['model']}")
        steps = None if last is None else last.get("client_steps")
        title = _title(method_title(summary), summary["dataset"], summary["seed"])
        return Head(title, " · ".join(about), data, tuple(notices), False, _quality(summary), _cost(summary, steps))
    except DataError as error:
        upto = "" if last is None else f"; the results are those of round {last['round']}"
        unfinished = f"This run is not finished: {_within(run, error)}{upto}."
        title = _unfinished_title(run)
        return Head(title, f"{run.path.resolve().name} · unfinished run", data, (unfinished, *notices), True)


def _title(method: str, dataset: str, seed: int) -> str:
    return f"{method} on {dataset}, seed {seed}"


def _unfinished_title(run: RunFolder) -> str:
    """Return :func:`_title` from the experiment, or the folder's name if that is incomplete."""
    try:
        settings, _ = parse(run.text(EXPERIMENT), EXPERIMENT)
        return _title(settings["algorithm"]["name"], settings["data"]["dataset"], settings["seed"])
    except (DataError, ExperimentError, KeyError, TypeError):
        return run.path.resolve().name


def _quality(summary: Mapping[str, Any]) -> tuple[Fact, ...]:
    facts = []
    for key, label in (("seen", "seen clients"), ("unseen", "unseen clients"), ("global", "global model")):
        group = summary[key]
        if group is not None and group["accuracy_mean"] is None:
            note = f"mean over {pluralize(group['clients'], 'client')}"
            facts.append(Fact(f"{label}, test loss", f"{group['loss_mean']:.4g}", note, key))
        elif group is not None:
            note = f"± {_percent(group['accuracy_std'])} over {pluralize(group['clients'], 'client')}; "
            note += f"worst decile {_percent(group['accuracy_worst_decile'])}"
            facts.append(Fact(f"{label}, test accuracy", f"{_percent(group['accuracy_mean'])} %", note, key))
    return tuple(facts)


def _cost(summary: Mapping[str, Any], client_steps: int | None) -> tuple[Fact, ...]:
    per_round = f"{pluralize(summary['clients_per_round'], 'client')} a round" if summary["clients_per_round"] else ""
    facts = [Fact("rounds", str(summary["rounds"]), per_round)]
    speed = summary["client_steps_per_s"]
    if client_steps is not None:
        facts.append(Fact("client steps", f"{client_steps:,}", f"{speed:.0f} a second" if speed is not None else ""))
    traffic = summary["communication"]
    wire = (traffic["wire_up"], traffic["wire_down"])
    note = "in process, no wire" if None in wire else f"{human_bytes(int(wire[0]) + int(wire[1]))} on the wire"
    facts.append(Fact("communication", human_bytes(int(traffic["payload_up"]) + int(traffic["payload_down"])), note))
    facts.append(Fact("duration", _duration(summary["duration_s"])))
    newcomer = summary.get(summary["algorithm"], {}).get("new_client", {}).get("personal")
    if newcomer is not None:
        down, up = (human_bytes(newcomer[key]).replace(" ", "\u00a0") for key in ("payload_down", "payload_up"))
        moved = f"receives {down}, sends {up}"
        facts.append(Fact("a new client", f"{newcomer['client_steps']:g} steps", moved))
    return tuple(facts)


def _results(run: RunFolder) -> Section:
    """Return the results table: the last round in both readings, and the best round."""
    lines = run.metrics()
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    last = lines[-1]
    masked = any(is_masked(last[key]) for key in ("seen", "unseen", "global") if last[key] is not None)
    main, other = ("masked", "unmasked") if masked else ("unmasked", "masked")
    chosen = _best(run)
    which = "last and best by validation" if chosen is not None and chosen["round"] == last["round"] else "last"
    blocks = [Block(f"Round {last['round']} ({which}), {main}", _rows(last))]
    read_otherwise = _other_reading(last, other)
    if any(group is not None for group in read_otherwise.values()):
        blocks.append(Block(f"Round {last['round']} ({which}), {other}", _rows(read_otherwise)))
    if chosen is not None and chosen["round"] != last["round"]:
        blocks.append(Block(f"Round {chosen['round']} (best by validation), {main}", _rows(chosen)))
    text = (
        "Each client counts once in mean, std (population) and worst; worst decile is the mean of the worst tenth "
        "(rounded up); pooled is right predictions over examples. Masked: only the labels of the client's own training "
        "data can be predicted. Loss: mean over clients, in nats. The best round has the highest pooled validation "
        "accuracy of seen clients (data without classes: the lowest validation loss), the earliest on ties; test data "
        "play no part in choosing it."
    )
    return Section("Results", blocks=tuple(blocks), text=" ".join([text, *_late(run)]))


def _late(run: RunFolder) -> list[str]:
    """Return a sentence on the last evaluations together, if the run is finished and has several."""
    found = _summary(run).get("last_evaluations")
    if found is None or found["evaluations"] < 2:  # a run of an older version, or one in progress
        return []
    first, last = found["rounds"]
    said = []
    for key, label in (("seen", "seen clients"), ("unseen", "unseen clients"), ("global", "global model")):
        over = (found[key] or {}).get("accuracy_mean")
        if over is not None:
            mean, *ends = (_percent(over[name]) for name in ("mean", "lowest", "highest"))
            said.append(f"{label} {mean} ({' to '.join(ends)})")
    if not said:
        return []
    return [
        f"Mean of the last {found['evaluations']} evaluations, rounds {first} to {last} (lowest to highest), in "
        f"percent: {'; '.join(said)}. The highest of several evaluations would be a choice made on test data."
    ]


def _best(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the best round; for a finished run it is in the summary, so that torch is not needed."""
    try:
        found: Mapping[str, Any] | None = inputs.checked(run, "summary.json")["best"]
        return found
    except DataError:
        from fedloom.evaluation.summary import best

        return best(run.evaluations())


def _other_reading(groups: Mapping[str, Any], other: str) -> dict[str, Any]:
    """Return the same groups in the other reading."""
    found: dict[str, Any] = {
        key: None if groups[key] is None else groups[key][other] for key in ("seen", "unseen", "global")
    }
    if found["global"] is not None:
        inner = _other_reading({**groups["global"], "global": None}, other)
        found["global"] = {**found["global"], "seen": inner["seen"], "unseen": inner["unseen"]}
    return found


def _rows(groups: Mapping[str, Any]) -> tuple[Row, ...]:
    rows = [
        Row("seen clients, personalized model", _cells(groups["seen"]), "seen"),
        Row("unseen clients, personalized model", _cells(groups["unseen"]), "unseen"),
    ]
    overall = groups["global"]
    if overall is not None:
        rows.append(Row("all clients, global model", _cells(overall), "global"))
        rows += [Row(f"{key} clients", _cells(overall[key])) for key in ("seen", "unseen") if overall[key] is not None]
    return tuple(rows)


def _cells(group: Mapping[str, Any] | None) -> tuple[str, ...]:
    if group is None:
        return (DASH,) * 6
    if group["accuracy_mean"] is None:
        return (str(group["clients"]), *(DASH,) * 4, f"{group['loss_mean']:.4g}")
    return (
        str(group["clients"]),
        f"{_percent(group['accuracy_mean'])} ± {_percent(group['accuracy_std'])}",
        _percent(group["accuracy_worst"]),
        _percent(group["accuracy_worst_decile"]),
        _percent(group["accuracy_pooled"]),
        f"{group['loss_mean']:.3f}",
    )


def _curves(run: RunFolder) -> Section:
    from fedloom.reporting import figures

    lines, losses = run.metrics(), run.training_loss()
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    panels, said = [], []
    if len(lines) > 1 and _without_classes(run):
        panels.append(Panel("learning-curve", figures.learning_curve(lines, "loss")))
        said.append("Test: mean over clients of each client's mean loss, the model's own, as the data have no classes.")
    elif len(lines) > 1:
        panels.append(Panel("learning-curve", figures.learning_curve(lines, "accuracy")))
        said.append("Test: mean over clients of each client's accuracy, ± one standard deviation over clients.")
    else:
        said.append(f"Only round {lines[0]['round']} was evaluated, so there is no curve of it.")
    if losses:
        panels.append(Panel("training-loss", figures.training_loss(losses)))
        said.append("Training: the method's own loss, mean over the cohort of each round.")
    return Section("Learning curves", tuple(panels), columns=2, text=" ".join(said))


def _reading(run: RunFolder) -> str:
    """Return the primary reading, ``masked`` or ``unmasked``."""
    last, _ = run.last_evaluation() or ({}, 0)
    groups = (last.get(key) for key in ("seen", "unseen"))
    return "masked" if any(is_masked(group) for group in groups if group is not None) else "unmasked"


def _clients(run: RunFolder) -> Section:
    from fedloom.reporting import figures

    rows, reading = run.clients(), _reading(run)
    panels = [Panel("clients", figures.distribution(rows, reading))]
    text = (
        f"Each client's test accuracy ({reading}, last evaluation). Distribution: the share of clients at or below an "
        "accuracy, so right is better; the thick foot of a line is the worst decile."
    )
    tables = [_worst(rows, reading, _class_names(run))]
    if f"global_accuracy_{reading}" in rows[0]:
        panels.append(Panel("personalization", figures.before_after(rows, reading)))
        tables.append(_changed(rows, reading))
        text += " Gain: above the diagonal, the personalized model is better on the client's test data."
    return Section("Clients", tuple(panels), tuple(tables), columns=2, text=text)


def _worst(rows: Sequence[Mapping[str, str]], reading: str, names: Mapping[str, str]) -> Table:
    """Return a table of the clients with the lowest accuracy, or of all clients if they are few."""
    column = f"personal_accuracy_{reading}"
    measured = sorted((row for row in rows if row[column]), key=lambda row: (float(row[column]), row["id"]))
    few = len(measured) <= FEW_CLIENTS
    shown = [
        _client(row, _percent(float(row[column])), row["train"], _classes(row["labels"].split(), names))
        for row in (measured if few else measured[: min(NAMED, math.ceil(len(measured) / 10))])
    ]
    title = "Clients, lowest accuracy first" if few else "Clients of lowest accuracy"
    return Table(title, ("client", "accuracy, %", "training examples", "classes"), tuple(shown))


def _changed(rows: Sequence[Mapping[str, str]], reading: str) -> Table:
    """Return a table of the clients with the largest losses and gains from personalization."""
    columns = (f"global_accuracy_{reading}", f"personal_accuracy_{reading}")
    measured = [row for row in rows if all(row[column] for column in columns)]
    both = [(row, float(row[columns[0]]), float(row[columns[1]])) for row in measured]
    both.sort(key=lambda each: (each[2] - each[1], each[0]["id"]))
    half = min(NAMED // 2, len(both) // 2)
    shown = [
        _client(row, _percent(before), _percent(after), f"{100 * (after - before):+.1f}")
        for row, before, after in both[:half] + both[len(both) - half :]
    ]
    headings = ("client", "global, %", "personalized, %", "gain, points")
    return Table("Smallest and largest gains by personalization", headings, tuple(shown))


def _client(row: Mapping[str, str], *cells: str) -> Row:
    """Return a table row for a client, with the name of its owner, if it has one."""
    owner = row.get("owner", "")
    return Row(row["id"], cells, "seen" if row["seen"] == "true" else "unseen", owner if owner != row["id"] else "")


def _classes(labels: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the names of a client's classes if they are at most two, else their number."""
    return ", ".join(names.get(label, label) for label in labels) if len(labels) <= 2 else str(len(labels))


def _named(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return the rows of ``clients.csv`` by id; empty if it cannot be read."""
    try:
        inputs.check(run, ("clients.csv",))
        return {row["id"]: row for row in run.clients()}
    except DataError:
        return {}


def _one_client(run: RunFolder) -> Section:
    """Return a card for each client with its data and its own model's confusion matrix."""
    from fedloom.reporting.figures import shown

    rows, confusions, reading = run.clients(), run.confusions(), _reading(run)
    manifest = run.manifest()
    names = [shown(name) for name in manifest.class_names]
    counts = {client.id: client.class_counts["train"] for client in manifest.clients}
    if len(rows) > CARDS:
        text = f"Of more than {CARDS:,} clients, confusion.csv alone has what each takes for what."
        return Section("Client by client", text=text)
    cards = []
    for k, row in enumerate(rows):
        pairs = confusions.get(row["id"], [])
        accuracy = row.get(f"personal_accuracy_{reading}")
        facts = [f"accuracy {_percent(float(accuracy))} %"] if accuracy else ["not measured"]
        facts += [f"{pluralize(int(row['train']), 'training example')}", _mix(counts.get(row["id"], ()), names)]
        headings, lines = _matrix(pairs, names)
        mark, owner = "seen" if row["seen"] == "true" else "unseen", row.get("owner", "")
        note = owner if owner != row["id"] else ""
        cards.append(Card(row["id"], f"c{k}", mark, note, "; ".join(filter(None, facts)), headings, lines))
    text = (
        f"Accuracy: {reading}. Test split, unmasked, personalized model: a row for each true class, a column for each "
        f"class it was taken for, in examples; of more than {CARD_CLASSES} classes, the most frequent ones."
    )
    return Section("Client by client", cards=tuple(cards), text=text)


def _matrix(
    pairs: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[tuple[int, int], ...]], ...]]:
    """Return headings and rows of a card's confusion matrix, limited to classes that occur in it."""
    often: dict[int, int] = {}
    for true, predicted, n in pairs:
        for k in (true, predicted):
            often[k] = often.get(k, 0) + n
    kept = sorted(sorted(often, key=lambda k: (-often[k], k))[:CARD_CLASSES])
    examples = {(true, predicted): n for true, predicted, n in pairs}
    rows = []
    for true in kept:
        total = sum(n for (row, _), n in examples.items() if row == true)
        if total:
            found = [examples.get((true, predicted), 0) for predicted in kept]
            rows.append((names[true], tuple((n, round(100 * n / total)) for n in found)))
    return tuple(names[k] for k in kept), tuple(rows)


def _mix(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the classes of a client's training data in percent, most frequent first; empty if unknown."""
    most = sorted((k for k, n in enumerate(counts) if n), key=lambda k: (-counts[k], k))
    parts = [f"{names[k]} ({100 * counts[k] / sum(counts):.0f} %)" for k in most[:NAMED]]
    return ", ".join([*parts, *([f"{len(most) - NAMED} more"] if len(most) > NAMED else [])])


def _class_names(run: RunFolder) -> dict[str, str]:
    """Return class names by number; empty if the partition cannot be read."""
    try:
        return {str(k): name for k, name in enumerate(run.manifest().class_names)}
    except DataError:
        return {}


def _confusion(run: RunFolder) -> Section:
    from fedloom.reporting import figures

    document = run.json("confusion.json")
    names = document["classes"]
    counts: dict[str, tuple[str, Sequence[Sequence[int]]]] = {}
    for group in ("seen", "unseen"):
        if document["personal"][group] is not None:
            counts[group] = (f"{group.capitalize()} clients, personalized model", document["personal"][group])
    if document["global"] is not None:
        groups = [each for each in document["global"].values() if each is not None]
        summed = [[sum(cells) for cells in zip(*lines, strict=True)] for lines in zip(*groups, strict=True)]
        counts["global"] = ("All clients, global model", summed)
    if not counts:
        raise DataError(f"{run.path / 'confusion.json'}: no client answered in round {document['round']}")
    wide = figures.confusion_is_wide(names)
    panels = tuple(
        Panel(f"confusion-{key}", figures.confusion(each, names, title), wide) for key, (title, each) in counts.items()
    )
    text = (
        f"Test split, unmasked, round {document['round']}. Each row is a class and sums to 100 %; colour is the square "
        "root of the share, so that rare mistakes can be seen."
    )
    labels = [figures.shown(name) for name in names]
    table = _mistakes([each for _, each in counts.values()], list(counts), labels, wide=wide or len(panels) % 2 == 0)
    return Section("Confusion matrix", panels, (table,), columns=2, text=text)


def _mistakes(
    counts: Sequence[Sequence[Sequence[int]]], headings: Sequence[str], names: Sequence[str], *, wide: bool
) -> Table:
    """Return a table of the first group's most frequent errors, with rates in all groups in percent of the class."""
    wrong = [(n, i, j) for i, row in enumerate(counts[0]) for j, n in enumerate(row) if i != j and n]
    most = sorted(wrong, key=lambda each: (-each[0], each[1], each[2]))[: 6 if wide else NAMED]
    shown = []
    for _, i, j in most:
        parts = [(each[i][j], sum(each[i])) for each in counts]
        shown.append(Row(f"{names[i]} → {names[j]}", tuple(_percent(n / of) if of else DASH for n, of in parts)))
    return Table(
        f"Most frequent mistakes of {headings[0]} clients", ("true → predicted, %", *headings), tuple(shown), wide
    )


def _calibration_of_clients(run: RunFolder) -> dict[str, float | None]:
    """Return each group's mean over clients of their own calibration errors; empty if the run is not finished."""
    found = _summary(run).get("uncertainty", {})
    return {key: of.get("ece_clients") for key, of in found.items() if of is not None}


def _calibration(run: RunFolder) -> Section:
    from fedloom.reporting.uncertainty_figures import reliability

    panel = Panel("reliability", reliability(run.json("calibration.json")))
    last, _ = run.last_evaluation() or ({}, 0)
    measured = last.get("uncertainty", {})
    of_clients = _calibration_of_clients(run)
    rows = tuple(
        Row(
            label,
            (
                _percent(found["ece"]),
                DASH if (own := of_clients.get(key)) is None else _percent(own),
                f"{found['entropy']:.3f}",
                f"{found['mutual_information']:.3f}",
            ),
            key,
        )
        for key, label in (("seen", "seen clients"), ("unseen", "unseen clients"), ("global", "global model"))
        if (found := measured.get(key)) is not None
    )
    headings = ("", "calibration error, %", "mean over clients, %", "entropy, nats", "mutual information, nats")
    table = Table("Calibration error and uncertainty", headings, rows)
    text = (
        "Test split, unmasked. Predictions are sorted by their confidence, the highest predicted probability, into "
        "bins; a calibrated model's accuracy equals its confidence (the diagonal). Calibration error: expected "
        "calibration error (ECE), the mean distance from the diagonal, weighted by examples, of all "
        "examples together; and of each client by itself, mean over clients, which is higher where one client is as "
        "overconfident as another is cautious, and where clients have few examples. Entropy of the "
        "prediction, and mutual information of prediction and model; the latter is zero where a client has one model "
        "and not a distribution of models."
    )
    return Section("Calibration", (panel,), (table,), columns=2, text=text)


def _uncertainty(run: RunFolder) -> Section:
    from fedloom.reporting.uncertainty_figures import accuracy_by_uncertainty, clients_over_training

    document = run.json("uncertainty.json")
    ids, seen, last = document["clients"]["ids"], document["clients"]["seen"], document["rounds"][-1]
    if all(value is None for value in last["entropy"]):
        raise DataError(f"{run.path / 'uncertainty.json'}: no client answered in round {last['round']}")
    panels = (
        Panel("uncertainty-training", clients_over_training(document), wide=True),
        Panel("uncertainty-clients", accuracy_by_uncertainty(document)),
    )
    clients = _named(run)
    most = sorted((-entropy, i) for i, entropy in enumerate(last["entropy"]) if entropy is not None)[:NAMED]
    rows = []
    for _, i in most:
        right = _percent(sum(last["right"][i]) / sum(last["examples"][i]))
        numbers = (right, f"{last['entropy'][i]:.3f}", f"{last['mutual_information'][i]:.3f}")
        rows.append(_client(clients.get(ids[i], {"id": ids[i], "seen": str(seen[i]).lower()}), *numbers))
    headings = ("client", "accuracy, %", "entropy, nats", "mutual information, nats")
    table = Table("Clients of highest entropy", headings, tuple(rows))
    text = (
        "Personalized model, test split, unmasked. Bars: share of a client's examples by confidence, correct "
        "predictions in colour, wrong ones grey; the first two evaluated rounds and the last. The clients are those at "
        "the minimum, the quartiles and the maximum of entropy after the last round. H and I: mean entropy of the "
        "prediction, and mean mutual information of prediction and model, in nats."
    )
    return Section("Uncertainty", panels, (table,), columns=2, text=text)


def _descriptors(run: RunFolder) -> Section:
    from fedloom.reporting import figures

    document, manifest = run.json("descriptors.json"), run.manifest()
    names = [figures.shown(name) for name in manifest.class_names]
    counts = {client.id: client.class_counts["train"] for client in manifest.clients}
    ids = document["clients"]["ids"]
    owners = {client.id: f"{client.id} ({client.owner})" for client in manifest.clients if client.owner}
    said = [": ".join(filter(None, (owners.get(id, id), _mix(counts.get(id, ()), names)))) for id in ids]
    points = tuple(zip(ids, said, strict=True))
    panels = [
        Panel("descriptors", figures.descriptor_map(document, manifest.class_names), points=points),
        Panel("correlation", figures.correlation(document)),
    ]
    if len(document["maps"]) > 1:
        panels.append(Panel("descriptors-training", figures.descriptor_maps(document), wide=True))
    excluded = document["excluded"][-1]
    text = (
        "Maps: one point per client, coloured by its most frequent class, diamonds for unseen clients; in the large "
        "map, rest on a point to see the client's class mix, click on it to see its confusion matrix. All are drawn "
        f"on the two principal axes of round {document['maps'][-1]['round']}, each around its own mean; the small ones "
        "on one scale. Rank correlation: for each unseen client, Spearman's coefficient between its descriptor's "
        "distances and its class mix's distances to all clients; mean and ± one standard deviation over unseen "
        "clients. The dotted line is the value at the first evaluation: an untrained embedding network that sees "
        "labels already correlates."
        + (f" {pluralize(excluded, 'unseen client')} without a coefficient (all distances equal)." if excluded else "")
    )
    return Section("Descriptors", tuple(panels), columns=2, text=text)


def _summary(run: RunFolder) -> Mapping[str, Any]:
    """Return the summary of a finished run; empty otherwise, as the top of the page explains."""
    try:
        return inputs.checked(run, "summary.json")
    except DataError:
        return {}


def _trained(run: RunFolder) -> int | None:
    """Return the number of rounds trained; None if unknown."""
    rounds: int | None = _summary(run).get("rounds")
    return rounds


def _phases(run: RunFolder) -> Section:
    from fedloom.reporting import figures

    rounds: dict[int, dict[str, float] | None] = {}  # a repeated round counts once
    failed = paused = 0.0
    for line in run.objects("journal.jsonl"):
        paused += line.get("paused", {}).get("seconds", 0.0)
        if line.get("outcome") == "evaluated":  # follows a round, whose phases stay
            continue
        done = line.get("outcome", "done") == "done"
        failed += 0.0 if done else line["seconds"]
        if "phases" in line:
            rounds[line["round"]] = line["phases"] if done else None
    by_round = {number: found for number, found in sorted(rounds.items()) if found is not None}
    phases = list(by_round.values())
    if _trained(run) == 0:
        return Section("Time", text="No round was trained.")
    if not any(phases):
        raise DataError(f"{run.path / 'journal.jsonl'}: has no round with phase times")
    others = {name: seconds for name, seconds in (("failed attempts", failed), ("paused", paused)) if seconds}
    duration = _summary(run).get("duration_s", 0.0)  # unknown for a run that is not finished
    rest = duration - failed - paused - sum(sum(phase.values()) for phase in phases)
    if rest > 0:
        others["evaluation and rest"] = rest
    panels = (
        Panel("time-rounds", figures.phases_over_rounds(list(by_round), phases)),
        Panel("time-total", figures.phases_total(phases, others)),
    )
    text = (
        f"Where the aggregator's time went in {pluralize(len(phases), 'round')}. A phase that is named after a message "
        "lasts from sending it to the last reply."
    )
    return Section("Time", panels, columns=2, text=text)


def _of_method(run: RunFolder) -> Mapping[str, Any]:
    """Return the method's own entries of the summary; empty if it cannot be read."""
    summary = _summary(run)
    found: Mapping[str, Any] = summary.get(summary.get("algorithm", ""), {})
    return found


def _method(run: RunFolder) -> Section:
    text = "What the method itself adds to summary.json, under its name."
    return Section("Method", text=text, pairs=tuple(_flat(_of_method(run))))


def _settings(run: RunFolder) -> Section:
    return Section("Settings", pre=run.text("experiment.yaml").strip())


def _partition(run: RunFolder) -> Section:
    from fedloom.reporting import figures

    manifest = run.manifest()
    scheme = {key: value for key, value in manifest.scheme.items() if value is not None}
    train = [client.class_counts["train"] for client in manifest.clients]
    classes = pluralize(manifest.classes, "class", "classes")
    pairs = (
        ("data set", f"{manifest.dataset}, {classes}, inputs {_shape(manifest.input_shape)}"),
        ("clients", f"{len(manifest.roster)} seen, {len(manifest.unseen)} unseen"),
        ("scheme", ", ".join(f"{key} {_value(value)}" for key, value in sorted(scheme.items(), key=_scheme_first))),
        ("training examples per client", _range([client.train for client in manifest.clients])),
        ("classes per client", _range([sum(1 for count in counts if count) for counts in train])),
        ("examples", ", ".join(f"{sum(c.size(s) for c in manifest.clients):,} {s}" for s in _SPLITS)),
        ("fingerprint", manifest.fingerprint),
    )
    if not any(map(sum, train)):
        return Section("Data", text="The training examples have no labels.", pairs=pairs)
    mixes = {
        group: [counts for client, counts in zip(manifest.clients, train, strict=True) if client.seen is seen]
        for group, seen in (("seen", True), ("unseen", False))
    }
    text = (
        "Training data: a column per client, ordered by most frequent class; the colour is the square root of the "
        "class's share."
    )
    if len(set(map(sum, train))) > 1:
        text += " Above it, its number of examples."
    together = math.ceil(len(train) / figures.MANY_CLIENTS)
    if together > 1:
        text += f" Each column shows the mean of {together} neighbours."
    panel = Panel("partition", figures.partition(mixes, manifest.class_names), wide=True)
    return Section("Data", (panel,), text=text, pairs=pairs)


def _scheme_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != "scheme", item[0]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}, median {statistics.median(values):g}"


_SPLITS = ("train", "validation", "test")


def _environment(run: RunFolder) -> Section:
    pairs = tuple(_flat(run.json("environment.json")))
    if not pairs:
        raise DataError(f"{run.path / 'environment.json'}: is empty")
    return Section("Environment", pairs=pairs)


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested objects as dotted keys."""
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            pairs += _flat(item, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", _value(item)))
    return pairs


def _annotated(svg: str, points: Sequence[tuple[str, str]], targets: Mapping[str, str]) -> str:
    """Return a figure with notes on its points, and links to existing cards."""
    from fedloom.reporting import drawing

    links = [targets.get(client) for client, _ in points]
    return drawing.annotated(svg, [note for _, note in points], links)


def _inline(panel: Panel, title: str, targets: Mapping[str, str]) -> str:
    """Return a figure as part of the page; a template filter."""
    from markupsafe import Markup, escape

    from fedloom.reporting import drawing

    label = escape(f"{title}: {panel.name}")
    svg = _annotated(drawing.inline(panel.svg, panel.name, drawing.COLOURS), panel.points, targets)
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # the run and its follower may both write
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from error


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(length) for length in shape)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
