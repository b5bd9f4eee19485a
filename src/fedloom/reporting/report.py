"""Report of a run: ``report.html``, one self-contained page made from the files of the run's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core.words import pluralize, rounded_up
from fedloom.errors import DataError, ExperimentError, StorageError
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.reporting.page import (
    DASH,
    Fact,
    PageSection,
    ReportPage,
    ReportSection,
    check_installed,
    reading,
    without_folder,
)
from fedloom.reporting.words import GROUP_TITLES, Document, human_bytes, human_time, method_title, number_range
from fedloom.runs.files import AUDIT, EXPERIMENT, JOURNAL, METRICS, PARTITION, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import headline_of, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(run_folder: str | Path) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` from the other files of a run's folder; return the page's path.

    The same files give the same bytes. A section whose file is missing or damaged is replaced by a note, so that a run
    that was stopped, or is in progress, has a report too.

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
    page = report_page(run)
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


def source_files() -> list[str]:
    """Return the files of runs that sections read; errors as of :func:`figures`."""
    check_installed("matplotlib")
    return sorted({name for section in report_sections() for name in section.files})


def report_page(run: RunFolder, titles: Collection[str] | None = None) -> ReportPage:
    """Return the report of a run, finished or not, with all sections or those of some titles."""
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
    sections = _sections(run, titles)
    try:
        summary = run.json(SUMMARY)
        with reading(run, SUMMARY):
            subtitle = " · ".join(
                (str(summary["name"]), f"algorithm {summary['algorithm']}", f"model {summary['model']}")
            )
            title = _title(method_title(summary), summary["dataset"], summary["seed"])
            steps = None if last is None else last.get("client_steps")
            facts = {"quality": _quality(summary), "cost": _cost(summary, steps)}
        return ReportPage(title, (subtitle, *about_data), sections, COLOURS, notices=notices, facts=facts)
    except DataError as error:
        results_of = "" if last is None else f" Results are those of round {last['round']}."
        unfinished = f"This run is not finished ({without_folder(run, error)}).{results_of}"
        subtitles = (f"{run.path.resolve().name} · unfinished run", *about_data)
        return ReportPage(_unfinished_title(run), subtitles, sections, COLOURS, notices=(unfinished, *notices))


def _of_last_round(run: RunFolder) -> tuple[tuple[str, ...], Document | None]:
    """Return notices about the evaluations, and the last evaluation; a damaged file is reported by the sections."""
    notices = []
    try:
        lines = run.metrics()
        last = lines[-1] if lines else None
        if lines.unreadable:
            notices.append(f"metrics.jsonl: {pluralize(lines.unreadable, 'unreadable line')} left out.")
        with reading(run, METRICS):
            missing = {} if last is None else last.get("left_out", {})
            if last is not None and any(missing.values()):
                notices.append(
                    f"The statistics of round {last['round']} leave out {pluralize(missing['absent'], 'client')} that "
                    f"did not answer and {missing['untested']} without test examples."
                )
    except DataError:
        return (), None
    return tuple(notices), last


def _sections(run: RunFolder, titles: Collection[str] | None = None) -> tuple[PageSection, ...]:
    wanted = (section for section in report_sections() if titles is None or section.title in titles)
    return tuple(content for section in wanted if (content := section.page_section(run)) is not None)


def report_sections() -> tuple[ReportSection, ...]:
    """Return the sections of a report in their order."""
    from fedloom.reporting import (
        report_audit,
        report_classes,
        report_descriptors,
        report_examples,
        report_results,
        report_setup,
    )

    def has(name: str) -> Callable[[RunFolder], bool]:
        return lambda run: run.has(name)

    return (
        ReportSection("Learning curves", report_results.learning_curves, (METRICS, JOURNAL)),
        ReportSection("Results", report_results.result_table, (METRICS, SUMMARY)),
        ReportSection("Clients", report_results.client_results, ("clients.csv", METRICS)),
        ReportSection(
            "Confusion matrix", report_classes.confusion_matrices, ("confusion.json",), report_results.has_classes
        ),
        ReportSection(
            "Calibration",
            report_classes.calibration,
            ("calibration.json", METRICS, SUMMARY),
            report_results.has_classes,
        ),
        ReportSection("By output", report_examples.outputs, ("outputs.json",), has("outputs.json")),
        ReportSection("Examples", report_examples.examples, ("examples.json",), has("examples.json")),
        ReportSection(
            "Descriptors",
            report_descriptors.descriptors,
            ("descriptors.json", PARTITION),
            has("descriptors.json"),
        ),
        ReportSection(
            "Uncertainty",
            report_classes.uncertainty,
            ("uncertainty.json", "clients.csv"),
            has("uncertainty.json"),
        ),
        ReportSection(
            "Client by client",
            report_classes.each_client,
            ("clients.csv", METRICS, "confusion.csv", PARTITION),
            lambda run: report_results.has_classes(run) and run.has("confusion.csv"),
        ),
        ReportSection("Privacy audit", report_audit.audit_parts, (AUDIT,), has(AUDIT)),
        ReportSection(
            "Privacy",
            report_setup.privacy,
            (SUMMARY, METRICS),
            lambda run: report_setup.summary_of(run).get("training_privacy") is not None,
        ),
        ReportSection("Method", report_setup.method, (SUMMARY,), lambda run: bool(report_setup.method(run).pairs)),
        ReportSection("Data", report_setup.data, (PARTITION,)),
        ReportSection("Time", report_setup.time, (JOURNAL, SUMMARY)),
        ReportSection("Settings", report_setup.settings),
        ReportSection("Environment", report_setup.machine, ("environment.json",)),
    )


def _title(method: str, dataset: str, seed: int) -> str:
    return f"{method} on {dataset}, seed {seed}"


def _unfinished_title(run: RunFolder) -> str:
    """Return :func:`_title` from the experiment, or the folder's name if that is incomplete."""
    try:
        settings, _ = parse_yaml(run.text(EXPERIMENT), EXPERIMENT)
        return _title(settings["algorithm"]["name"], settings["data"]["dataset"], settings["seed"])
    except (DataError, ExperimentError, KeyError, TypeError):
        return run.path.resolve().name


def _quality(summary: Document) -> tuple[Fact, ...]:
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


def _cost(summary: Document, client_steps: int | None) -> tuple[Fact, ...]:
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
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # two commands may both write
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from error
