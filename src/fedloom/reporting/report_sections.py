"""Sections of a run's report, in their order."""

from __future__ import annotations

from fedloom.reporting import (
    report_audit,
    report_classes,
    report_descriptors,
    report_examples,
    report_results,
    report_setup,
    report_uncertainty,
)
from fedloom.reporting.page import ReportSection
from fedloom.runs.files import AUDIT, JOURNAL, METRICS, PARTITION, SUMMARY

SECTIONS = (
    ReportSection("Learning curves", report_results.learning_curves, (METRICS, JOURNAL)),
    ReportSection("Results", report_results.result_table, (METRICS, SUMMARY)),
    ReportSection("Clients", report_results.client_results, ("clients.csv", METRICS)),
    ReportSection(
        "Confusion matrix", report_classes.confusion_matrices, ("confusion.json",), report_results.has_classes
    ),
    ReportSection(
        "Calibration",
        report_uncertainty.calibration,
        ("calibration.json", METRICS, SUMMARY),
        report_results.has_classes,
    ),
    ReportSection("By output", report_examples.outputs, ("outputs.json",), lambda run: run.has("outputs.json")),
    ReportSection("Examples", report_examples.examples, ("examples.json",), lambda run: run.has("examples.json")),
    ReportSection(
        "Descriptors",
        report_descriptors.descriptors,
        ("descriptors.json", PARTITION),
        lambda run: run.has("descriptors.json"),
    ),
    ReportSection(
        "Uncertainty",
        report_uncertainty.uncertainty,
        ("uncertainty.json", "clients.csv"),
        lambda run: run.has("uncertainty.json"),
    ),
    ReportSection(
        "Client by client",
        report_classes.each_client,
        ("clients.csv", METRICS, "confusion.csv", PARTITION),
        lambda run: report_results.has_classes(run) and run.has("confusion.csv"),
    ),
    ReportSection("Privacy audit", report_audit.audit_parts, (AUDIT,), lambda run: run.has(AUDIT)),
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
"""Sections of a report in their order."""
