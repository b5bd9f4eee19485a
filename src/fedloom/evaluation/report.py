"""``report.html``: what a run found, on one self-contained page, from the files of its folder alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import DataError, ExperimentError, StorageError
from fedloom.evaluation.run_folder import RunFolder, human_bytes, is_masked

DASH = "–"


@dataclass(frozen=True)
class Row:
    """A line of the results table; ``mark`` is the group whose colour it has, empty for a part of one."""

    label: str
    cells: tuple[str, ...]
    mark: str = ""


@dataclass(frozen=True)
class Block:
    """Lines of the results table that share a round and a reading."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Fact:
    """A number of the head of the page."""

    label: str
    value: str
    note: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page: a figure (and its file's name), the table, pairs, or text; or why it is left out."""

    title: str
    text: str = ""
    svg: str = ""
    blocks: tuple[Block, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    pre: str = ""
    absent: str = ""
    figure: str = ""


def write_report(run_folder: str | Path) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` from the other files of a run's folder.

    The same files give the same bytes. A section whose file is absent or broken says so and is left out, so that a
    run that was stopped, or is still going, has a report too.

    Returns
    -------
    Path
        Of ``report.html``.

    Raises
    ------
    DataError
        If the folder is not that of a run.
    ExperimentError
        If matplotlib or jinja2 is not installed.
    StorageError
        If the report cannot be written.
    """
    run = RunFolder.open(run_folder)
    try:
        import jinja2

        from fedloom.evaluation import figures
    except ModuleNotFoundError as error:
        raise ExperimentError(
            f"a report needs the package {error.name}, which is not installed",
            hint="pip install 'fedloom[report]'",
        ) from error

    sections = [
        _section("Results", run, _results),
        _section("Accuracy", run, _accuracy),
        _section("Clients", run, _distribution),
        _section("Time", run, _phases),
        _section("Settings", run, _settings),
        _section("Data", run, _partition),
        _section("Environment", run, _environment),
    ]
    if (run.path / "descriptors.json").exists():  # only some methods have descriptors
        sections.insert(3, _section("Descriptors", run, _descriptors))
    title, subtitle, notices, facts = _head(run)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedloom.evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [_inlined(section, figures.inline) for section in sections]
    page = environment.get_template("report.html.j2").render(
        title=title, subtitle=subtitle, notices=notices, facts=facts, sections=shown
    )
    for section in sections:
        if section.figure:
            _write(run.path / "figures" / f"{section.figure}.svg", section.svg)
    _write(run.path / "report.html", page)
    return run.path / "report.html"


def _section(title: str, run: RunFolder, build: Callable[[RunFolder], Section]) -> Section:
    """A section, or the line that says why it is left out: the one place where a broken file is forgiven."""
    try:
        return build(run)
    except DataError as error:
        return Section(title, absent=_within(run, error))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return Section(title, absent=f"its file is not what FedLoom writes ({type(error).__name__}: {error})")


def _within(run: RunFolder, error: DataError) -> str:
    """The message with paths relative to the run's folder: a report says nothing of the machine it was made on."""
    return str(error).replace(f"{run.path}/", "")


def _head(run: RunFolder) -> tuple[str, str, list[str], list[Fact]]:
    """Title, subtitle, notices and the numbers of the head of the page."""
    notices: list[str] = []
    try:
        lines = run.metrics()
        if lines.unreadable:
            notices.append(f"metrics.jsonl: {lines.unreadable} unreadable line(s) left out.")
        last = lines.objects[-1] if lines.objects else None
        if last is not None and any(last.get("left_out", {}).values()):
            missing = last["left_out"]
            notices.append(
                f"Not in the statistics of round {last['round']}: {missing['absent']} client(s) that did not answer, "
                f"{missing['untested']} without test examples."
            )
    except (DataError, KeyError, TypeError, AttributeError):  # the sections made from this file say what is wrong
        last = None
    try:
        summary = run.json("summary.json")
        facts = _facts(summary)
        seed = f"seed {summary['seed']}"
        subtitle = f"{summary['algorithm']} · {summary['dataset']} · {summary['model']} · {seed}"
        return str(summary["name"]), subtitle, notices, facts
    except (DataError, KeyError, TypeError, ValueError) as error:
        why = (
            _within(run, error)
            if isinstance(error, DataError)
            else f"summary.json is not what FedLoom writes ({error!r})"
        )
        upto = "" if last is None else f"; the results are those of round {last['round']}"
        notices.insert(0, f"This run is not finished: {why}{upto}.")
        return run.path.resolve().name, "unfinished run", notices, []


def _facts(summary: Mapping[str, Any]) -> list[Fact]:
    """The numbers of the head of the page."""
    facts = []
    for key, label in (("seen", "seen clients"), ("unseen", "unseen clients"), ("global", "global model")):
        group = summary[key]
        if group is not None:
            note = f"accuracy, ± {_percent(group['accuracy_std'])}, {group['clients']} clients"
            facts.append(Fact(label, f"{_percent(group['accuracy_mean'])} %", note, key))
    traffic = summary["communication"]
    per_round = f"{summary['clients_per_round']} clients a round" if summary["clients_per_round"] else ""
    facts.append(Fact("rounds", str(summary["rounds"]), per_round))
    both = int(traffic["payload_up"]) + int(traffic["payload_down"])
    wire = (traffic["wire_up"], traffic["wire_down"])
    note = "in process, no wire" if None in wire else f"{human_bytes(int(wire[0]) + int(wire[1]))} on the wire"
    facts.append(Fact("communication", human_bytes(both), note))
    speed = summary["client_steps_per_s"]
    facts.append(
        Fact("duration", _duration(summary["duration_s"]), f"{speed:.0f} client steps/s" if speed is not None else "")
    )
    return facts


def _results(run: RunFolder) -> Section:
    """The table: last round in both readings, and the best round."""
    lines = run.metrics().objects
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    last = lines[-1]
    masked = any(is_masked(last[key]) for key in ("seen", "unseen", "global") if last[key] is not None)
    main, other = ("masked", "unmasked") if masked else ("unmasked", "masked")
    blocks = [Block(f"Round {last['round']} (last), {main}", _rows(last))]
    read_otherwise = _other_reading(last, other)
    if any(group is not None for group in read_otherwise.values()):
        blocks.append(Block(f"Round {last['round']} (last), {other}", _rows(read_otherwise)))
    from fedloom.evaluation.summary import best  # torch: only needed here

    chosen = best(lines)
    if chosen is not None:
        blocks.append(Block(f"Round {chosen['round']} (best by validation), {main}", _rows(chosen)))
    text = (
        "Each client counts once in mean, std (population) and worst; worst decile is the mean of the worst tenth "
        "(rounded up); pooled is right predictions over examples. Masked: only the labels of the client's own training "
        "data can be predicted. Loss: mean over clients, in nats. The best round has the highest pooled validation "
        "accuracy of seen clients, the earliest on ties; test data play no part in choosing it."
    )
    return Section("Results", text=text, blocks=tuple(blocks))


def _other_reading(groups: Mapping[str, Any], other: str) -> dict[str, Any]:
    """The same groups in the other reading."""
    found: dict[str, Any] = {
        key: None if groups[key] is None else groups[key][other] for key in ("seen", "unseen", "global")
    }
    if found["global"] is not None:
        inner = _other_reading({**groups["global"], "global": None}, other)
        found["global"] = {**found["global"], "seen": inner["seen"], "unseen": inner["unseen"]}
    return found


def _rows(groups: Mapping[str, Any]) -> tuple[Row, ...]:
    rows = [
        Row("seen clients, own model", _cells(groups["seen"]), "seen"),
        Row("unseen clients, own model", _cells(groups["unseen"]), "unseen"),
    ]
    overall = groups["global"]
    if overall is not None:
        rows.append(Row("all clients, global model", _cells(overall), "global"))
        rows += [Row(f"{key} clients", _cells(overall[key])) for key in ("seen", "unseen") if overall[key] is not None]
    return tuple(rows)


def _cells(group: Mapping[str, Any] | None) -> tuple[str, ...]:
    if group is None:
        return (DASH,) * 6
    return (
        str(group["clients"]),
        f"{_percent(group['accuracy_mean'])} ± {_percent(group['accuracy_std'])}",
        _percent(group["accuracy_worst"]),
        _percent(group["accuracy_worst_decile"]),
        _percent(group["accuracy_pooled"]),
        f"{group['loss_mean']:.3f}",
    )


def _accuracy(run: RunFolder) -> Section:
    from fedloom.evaluation import figures

    lines = run.metrics().objects
    if not lines:
        raise DataError(f"{run.path / 'metrics.jsonl'}: has no evaluated round")
    svg = figures.accuracy(lines)
    text = (
        "Mean over clients of each client's test accuracy; the band is ± one standard deviation over clients. "
        "Communication counts the tensors of training, both directions, each client's copy on its own."
    )
    return Section("Accuracy", text=text, svg=svg, figure="accuracy")


def _distribution(run: RunFolder) -> Section:
    from fedloom.evaluation import figures

    lines = run.metrics().objects
    groups = [lines[-1][key] for key in ("seen", "unseen") if lines[-1][key] is not None] if lines else []
    reading = "masked" if any(is_masked(group) for group in groups) else "unmasked"
    svg = figures.distribution(run.clients(), reading)
    text = (
        f"Part of the clients whose test accuracy ({reading}, last evaluation) is at or below a value: right is better."
    )
    return Section("Clients", text=text, svg=svg, figure="clients")


def _descriptors(run: RunFolder) -> Section:
    from fedloom.evaluation import figures

    document = run.json("descriptors.json")
    svg = figures.descriptors(document, run.manifest().class_names)
    excluded = document["excluded"][-1]
    text = (
        "Left: one point per client, coloured by its most frequent class, on the first two principal components. "
        "Right: for each unseen client, Spearman's coefficient between its descriptor's distances and its class "
        "mix's distances to all clients; mean and ± one standard deviation over unseen clients. The dotted line "
        "is the value at the first evaluation: an untrained embedding network that sees labels already correlates."
        + (f" {excluded} unseen client(s) without a coefficient (all distances equal)." if excluded else "")
    )
    return Section("Descriptors", text=text, svg=svg, figure="descriptors")


def _phases(run: RunFolder) -> Section:
    from fedloom.evaluation import figures

    found = run.lines("journal.jsonl")
    done = [line for line in found.objects if line.get("outcome", "done") == "done"]  # not the failed attempts
    timed = [line["phases"] for line in done if line.get("phases")]
    if not timed:
        raise DataError(f"{run.path / 'journal.jsonl'}: has no round with phase times")
    svg = figures.phases(timed)
    text = f"Where the aggregator's time goes, mean over {len(timed)} rounds."
    return Section("Time", text=text, svg=svg, figure="phases")


def _settings(run: RunFolder) -> Section:
    return Section("Settings", pre=run.text("experiment.yaml").strip())


def _partition(run: RunFolder) -> Section:
    manifest = run.manifest()
    scheme = {key: value for key, value in manifest.scheme.items() if value is not None}
    classes = [sum(1 for count in client.class_counts["train"] if count) for client in manifest.clients]
    pairs = (
        ("data set", f"{manifest.dataset}, {manifest.classes} classes, inputs {_shape(manifest.input_shape)}"),
        ("clients", f"{len(manifest.roster)} seen, {len(manifest.unseen)} unseen"),
        ("scheme", ", ".join(f"{key} {_value(value)}" for key, value in sorted(scheme.items(), key=_scheme_first))),
        ("training examples per client", _range([client.train for client in manifest.clients])),
        ("classes per client", _range(classes)),
        ("examples", ", ".join(f"{sum(c.size(s) for c in manifest.clients)} {s}" for s in _SPLITS)),
        ("fingerprint", manifest.fingerprint),
    )
    return Section("Data", pairs=pairs)


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
    """Nested objects as dotted keys."""
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            pairs += _flat(item, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", _value(item)))
    return pairs


def _inlined(section: Section, inline: Callable[[str], str]) -> Section:
    """The section with its figure ready for the page."""
    if not section.svg:
        return section
    from markupsafe import Markup

    label = json.dumps(section.title)
    svg = inline(section.svg).replace("<svg ", f"<svg role='img' aria-label={label} ", 1)
    return Section(section.title, section.text, Markup(svg), figure=section.figure)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
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
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
