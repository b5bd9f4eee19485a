"""Report of a run: ``report.html``, one self-contained page made from the files of the run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.words import pluralize, rounded_up
from fedloom.errors import DataError, ExperimentError, StorageError
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.reporting import inputs, report_audit, report_classes, report_examples, report_results, report_setup
from fedloom.reporting.page import DASH, Fact, PageSection, Part, ReportPage, check_installed
from fedloom.reporting.words import GROUP_TITLES, human_bytes, human_time, method_title, number_range
from fedloom.runs.files import AUDIT, EXPERIMENT
from fedloom.runs.folder import RunFolder
from fedloom.tasks.headline import headline_of, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES: Mapping[str, Sequence[str]] = {
    "Learning curves": ("metrics.jsonl", "partition.json"),
    "Results": ("metrics.jsonl", "summary.json"),
    "Clients": ("clients.csv", "metrics.jsonl"),
    "Confusion matrix": ("confusion.json",),
    "Calibration": ("calibration.json", "metrics.jsonl", "summary.json"),
    "Descriptors": ("descriptors.json", "partition.json"),
    "By output": ("outputs.json",),
    "Examples": ("examples.json",),
    "Uncertainty": ("uncertainty.json", "clients.csv"),
    "Client by client": ("clients.csv", "metrics.jsonl", "confusion.csv", "partition.json"),
    "Privacy audit": (AUDIT,),
    "Privacy": ("summary.json", "metrics.jsonl"),
    "Data": ("partition.json",),
    "Time": ("journal.jsonl", "summary.json"),
    "Environment": ("environment.json",),
}
"""Files that each section reads, besides those of every run."""


@dataclass(frozen=True)
class AutoRefresh:
    """Automatic reload of the page of a run in progress: the interval in seconds, and the state of the run.

    ``every_s`` is None if the page will not be rewritten, because the run has ended.
    """

    every_s: int | None
    state: str


def write_report(run_folder: str | Path, renewal: AutoRefresh | None = None) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` from the other files of a run's folder; return the page's path.

    The same files give the same bytes. A section whose file is missing or damaged is replaced by a note, so that a run
    that was stopped, or is in progress, has a report too.

    Parameters
    ----------
    renewal
        For a followed run (:mod:`fedloom.reporting.follow`): the page states its progress, and omits sections whose
        files are written at the end.

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
    check_installed("jinja2", "matplotlib")
    page = _page(run)
    if renewal is not None:
        page = _followed(page, renewal)
    for name, svg in page.figures().items():
        _write(run.path / "figures" / name, svg)
    _write(run.path / "report.html", page.render())
    return run.path / "report.html"


def figures(run_folder: str | Path) -> dict[str, Figure]:
    """Return the figures of a run's report by name, as in ``figures/NAME.svg``; errors as of :func:`write_report`."""
    run = RunFolder.open(run_folder)
    check_installed("matplotlib")
    panels = (panel for section in _sections(run) for part in section.parts for panel in part.panels)
    return {panel.name: panel.svg.figure for panel in panels}


def _page(run: RunFolder) -> ReportPage:
    from fedloom.reporting.drawing import COLOURS

    notices, last = _of_last_round(run)
    try:
        manifest = run.manifest()
        about_data: tuple[str, ...] = (
            f"{len(manifest.roster)} seen and {pluralize(len(manifest.unseen), 'unseen client')}, scheme "
            f"{manifest.scheme.get('scheme', DASH)}, {number_range([client.train for client in manifest.clients])} "
            "training examples each",
        )
    except DataError:
        about_data = ()
    sections = tuple(_sections(run))
    try:
        summary = inputs.checked(run, "summary.json")
    except DataError as error:
        results_of = "" if last is None else f" Results are those of round {last['round']}."
        unfinished = f"This run is not finished ({_within(run, error)}).{results_of}"
        subtitles = (f"{run.path.resolve().name} · unfinished run", *about_data)
        return ReportPage(_unfinished_title(run), subtitles, sections, COLOURS, notices=(unfinished, *notices))
    about = " · ".join((str(summary["name"]), f"algorithm {summary['algorithm']}", f"model {summary['model']}"))
    title = _title(method_title(summary), summary["dataset"], summary["seed"])
    facts = {"quality": _quality(summary), "cost": _cost(summary, None if last is None else last.get("client_steps"))}
    return ReportPage(title, (about, *about_data), sections, COLOURS, notices=notices, facts=facts)


def _of_last_round(run: RunFolder) -> tuple[tuple[str, ...], Mapping[str, Any] | None]:
    """Return notices about the evaluations, and the last evaluation; a damaged file is reported by the sections."""
    notices = []
    try:
        lines = run.metrics()
        inputs.check_files(run, ("metrics.jsonl",))
    except DataError:
        return (), None
    if lines.unreadable:
        notices.append(f"metrics.jsonl: {pluralize(lines.unreadable, 'unreadable line')} left out.")
    last = lines[-1] if lines else None
    if last is not None and any(last.get("left_out", {}).values()):
        missing = last["left_out"]
        notices.append(
            f"The statistics of round {last['round']} leave out {pluralize(missing['absent'], 'client')} that did not "
            f"answer and {missing['untested']} without test examples."
        )
    return tuple(notices), last


def _followed(page: ReportPage, renewal: AutoRefresh) -> ReportPage:
    """Return the page of a run in progress, with its state as a notice, without the sections that are still to come."""
    later = [section.title for section in page.sections if section.pending] if renewal.every_s else []
    state = f"{renewal.state} Sections written at the end: {', '.join(later)}." if later else renewal.state
    return replace(
        page,
        sections=tuple(section for section in page.sections if section.title not in later),
        notices=(state, *(page.notices if page.facts else page.notices[1:])),
        refresh_s=renewal.every_s,
    )


def _sections(run: RunFolder) -> list[PageSection]:
    parts: dict[str, Callable[[RunFolder], Part | Sequence[Part]]] = {
        "Learning curves": report_results.learning_curves,
        "Results": report_results.result_table,
    }
    parts["Clients"] = report_results.client_results
    if report_results.has_classes(run):
        parts["Confusion matrix"] = report_classes.confusion_matrices
        parts["Calibration"] = report_classes.calibration
    if (run.path / "outputs.json").exists():  # only for tasks with labels, or classes of pixels
        parts["By output"] = report_examples.outputs
    if (run.path / "examples.json").exists():  # only for tasks with pictures, of runs that had the data
        parts["Examples"] = report_examples.examples
    if (run.path / "descriptors.json").exists():  # only for methods with descriptors
        parts["Descriptors"] = report_classes.descriptors
    if (run.path / "uncertainty.json").exists():  # only for methods whose models are distributions
        parts["Uncertainty"] = report_classes.uncertainty
    if report_results.has_classes(run) and (run.path / "confusion.csv").exists():
        parts["Client by client"] = report_classes.each_client
    if run.has(AUDIT):
        parts["Privacy audit"] = report_audit.audit_parts
    if report_setup.summary_of(run).get("training_privacy") is not None:
        parts["Privacy"] = report_setup.privacy
    if report_setup.method(run).pairs:
        parts["Method"] = report_setup.method
    parts |= {"Data": report_setup.data, "Time": report_setup.time}
    parts |= {"Settings": report_setup.settings, "Environment": report_setup.machine}
    return [section_of(title, run, build) for title, build in parts.items()]


def section_of(title: str, run: RunFolder, build: Callable[[RunFolder], Part | Sequence[Part]]) -> PageSection:
    """Return a section, or a note on the damaged file; other errors are bugs and are raised."""
    files = FILES.get(title, ())
    try:
        try:
            found = build(run)
            return PageSection(title, (found,) if isinstance(found, Part) else tuple(found))
        except inputs.OF_BROKEN_FILES:
            inputs.check_files(run, files)
            raise
    except DataError as error:
        pending = any(not (run.path / name).exists() for name in files)
        return PageSection(title, absent=_within(run, error), pending=pending)


def _within(run: RunFolder, error: DataError) -> str:
    """Return the message with paths relative to the run's folder, so that a report reveals nothing of its machine."""
    return str(error).replace(f"{run.path}/", "")


def _title(method: str, dataset: str, seed: int) -> str:
    return f"{method} on {dataset}, seed {seed}"


def _unfinished_title(run: RunFolder) -> str:
    """Return :func:`_title` from the experiment, or the folder's name if that is incomplete."""
    try:
        settings, _ = parse_yaml(run.text(EXPERIMENT), EXPERIMENT)
        return _title(settings["algorithm"]["name"], settings["data"]["dataset"], settings["seed"])
    except (DataError, ExperimentError, KeyError, TypeError):
        return run.path.resolve().name


def _quality(summary: Mapping[str, Any]) -> tuple[Fact, ...]:
    facts, headline = [], headline_of(summary)
    for key, label in GROUP_TITLES.items():
        group = summary[key]
        if group is None:
            continue
        mean, std, _, decile, _ = values_of(group, headline)
        clients = pluralize(group["clients"], "client")
        note = f"mean over {clients}" if std is None else f"± {headline.shown(std)} over {clients}"
        note += "" if decile is None else f"; worst decile {headline.shown(decile)}"
        value = DASH if mean is None else f"{headline.shown(mean)}{headline.unit}"
        facts.append(Fact(f"{label}, test {headline.title}", value, note, key))
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
    facts.append(Fact("duration", human_time(summary["duration_s"])))
    if (claim := summary.get("training_privacy")) is not None:
        unit = {"clients": "of clients", "examples": "of examples"}[claim["unit"]]
        spent = "no guarantee" if claim["epsilon"] is None else f"ε = {rounded_up(claim['epsilon'])}"
        facts.append(Fact("privacy of training", spent, f"δ = {claim['delta']:g}, {unit}"))
    newcomer = summary.get(summary["algorithm"], {}).get("new_client", {}).get("personal")
    if newcomer is not None:
        down, up = (human_bytes(newcomer[key]).replace(" ", "\u00a0") for key in ("payload_down", "payload_up"))
        facts.append(Fact("a new client", f"{newcomer['client_steps']:g} steps", f"receives {down}, sends {up}"))
    return tuple(facts)


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # the run and its follower may both write
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from error
