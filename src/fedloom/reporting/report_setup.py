"""Sections of a report on data, time, method, settings and environment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.core.words import dotted_keys, pluralize
from fedloom.data.manifest import Manifest
from fedloom.errors import DataError
from fedloom.reporting.page import Panel, Part
from fedloom.reporting.tables import Table, TableRow, table_row
from fedloom.reporting.words import number_range, shown_epsilon, shown_guarantee
from fedloom.runs.files import SUMMARY
from fedloom.runs.folder import RunFolder


def summary_of(run: RunFolder) -> Mapping[str, Any]:
    """Return the summary of a finished run; empty otherwise, which the top of the page explains."""
    try:
        return run.json_or_none(SUMMARY) or {}
    except DataError:
        return {}


def time(run: RunFolder) -> Part:
    """Return the time spent in the phases of the rounds, and outside them."""
    from fedloom.reporting import figures

    summary = summary_of(run)
    if summary.get("rounds") == 0:
        return Part(text="No round was trained.")
    by_round, outside = _phases(run)
    phases = list(by_round.values())
    if not any(phases):
        raise DataError(f"{run.path / 'journal.jsonl'}: has no round with phase times")
    rest = summary.get("duration_s", 0.0) - sum(outside.values()) - sum(sum(phase.values()) for phase in phases)
    others = {name: seconds for name, seconds in (*outside.items(), ("evaluation and rest", rest)) if seconds > 0}
    panels = (
        Panel("time-rounds", figures.draw_phases_by_round(list(by_round), phases)),
        Panel("time-total", figures.draw_phase_totals(phases, others)),
    )
    text = (
        f"Time of the aggregator in {pluralize(len(phases), 'round')}. A phase that is named after a message lasts "
        "from sending it to the last reply."
    )
    return Part(panels=panels, columns=2, text=text)


def _phases(run: RunFolder) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Return the phases of each round that was completed, and the seconds of failed attempts and pauses."""
    rounds: dict[int, dict[str, float] | None] = {}  # a repeated round counts once
    failed = paused = 0.0
    for line in run.objects("journal.jsonl"):
        paused += line.get("paused", {}).get("seconds", 0.0)
        outcome = line.get("outcome", "done")
        if outcome in ("burnt", "evaluated", "budget spent"):  # follows a round, whose phases stay
            continue
        failed += 0.0 if outcome == "done" else line["seconds"]
        if "phases" in line:
            rounds[line["round"]] = line["phases"] if outcome == "done" else None
    done = {number: found for number, found in sorted(rounds.items()) if found is not None}
    return done, {"failed attempts": failed, "paused": paused}


def method(run: RunFolder) -> Part:
    """Return the method's own entries of the summary; without any if it cannot be read."""
    summary = summary_of(run)
    pairs = _pairs(summary.get(summary.get("algorithm", ""), {}))
    return Part(text="Entries of the method itself in summary.json.", pairs=pairs)


def privacy(run: RunFolder) -> Part:
    """Return the claim of the training's differential privacy in sentences, its numbers, and ε by round."""
    claim = summary_of(run)["training_privacy"]
    spent = [(line["round"], line["privacy"]) for line in run.metrics() if line.get("privacy") is not None]
    rows = tuple(table_row(str(round), shown_epsilon(now["epsilon"]), f"{now['sums']:,}") for round, now in spent)
    table = Table(("round", "ε", "noisy sums"), (("", _thinned(rows)),), title="ε by round", small=True)
    return Part(
        tables=(table,) if rows else (),
        text=" ".join(claim["statement"]),
        pairs=(
            ("unit", claim["unit"]),
            ("neighbouring data", claim["neighbouring"]),
            ("ε toward readers of the models", shown_epsilon(claim["to_readers"]["epsilon"])),
            ("ε toward members", shown_guarantee(claim.get("to_members"))),
            ("ε toward the aggregator", shown_epsilon(claim["to_aggregator"]["epsilon"])),
            ("δ", f"{claim['delta']:g}"),
            ("mechanism", f"{claim['mechanism']} noise, sampling {', '.join(claim['sampling']) or 'none'}"),
            ("clipping norm, noise multiplier", f"{claim['clip']:g}, {claim['noise_multiplier']:.4g}"),
            ("source of noise", claim["noise"]),
            ("covers", ", ".join(claim["covers"])),
        ),
    )


def _thinned(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Return at most a dozen rows, evenly spaced, the last included."""
    step = math.ceil(len(rows) / 12)
    return tuple(rows[::-1][:: step or 1][::-1])


def settings(run: RunFolder) -> Part:
    """Return the experiment file."""
    return Part(pre=run.text("experiment.yaml").strip())


def machine(run: RunFolder) -> Part:
    """Return versions and hardware."""
    pairs = _pairs(run.json("environment.json"))
    if not pairs:
        raise DataError(f"{run.path / 'environment.json'}: is empty")
    return Part(pairs=pairs)


def data(run: RunFolder) -> Part:
    """Return the partition: its scheme, and the classes of every client, if the data have classes."""
    from fedloom.reporting import figures

    manifest = run.manifest()
    pairs = _about_partition(manifest)
    if not manifest.classes:
        return Part(pairs=pairs)
    train = [client.class_counts["train"] for client in manifest.clients]
    if not any(map(sum, train)):
        return Part(text="The training examples have no labels.", pairs=pairs)
    mixes: dict[str, list[Sequence[int]]] = {"seen": [], "unseen": []}
    for client, counts in zip(manifest.clients, train, strict=True):
        mixes["seen" if client.seen else "unseen"].append(counts)
    text = (
        "Training data: a column per client, ordered by most frequent class. The colour is the square root of the "
        "class's share."
    )
    if len(set(map(sum, train))) > 1:
        text += " The curve above is its number of examples."
    together = math.ceil(len(train) / figures.MANY_CLIENTS)
    if together > 1:
        text += f" Each column is the mean of {together} neighbours."
    panel = Panel("partition", figures.draw_partition(mixes, manifest.class_names), wide=True)
    return Part(panels=(panel,), text=text, pairs=pairs)


def _about_partition(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    scheme = {key: value for key, value in manifest.scheme.items() if value is not None}
    ordered = sorted(scheme.items(), key=lambda item: (item[0] != "scheme", item[0]))
    classes_of = [sum(1 for count in client.class_counts["train"] if count) for client in manifest.clients]
    sizes = {split: sum(c.size(split) for c in manifest.clients) for split in ("train", "validation", "test")}
    inputs_of = "×".join(map(str, manifest.input_shape))
    return (
        ("data set", f"{manifest.dataset}{_predicted(manifest)}, inputs {inputs_of}"),
        ("clients", f"{len(manifest.roster)} seen, {len(manifest.unseen)} unseen"),
        ("scheme", ", ".join(f"{key} {_value(value)}" for key, value in ordered)),
        ("training examples per client", number_range([client.train for client in manifest.clients])),
        *([("classes per client", number_range(classes_of))] if manifest.classes else []),
        ("examples", ", ".join(f"{size:,} {split}" for split, size in sizes.items())),
        ("fingerprint", manifest.fingerprint),
    )


def _predicted(manifest: Manifest) -> str:
    if manifest.targets is not None:
        return f", {manifest.targets.task}, {pluralize(manifest.targets.outputs, 'output')}"
    return f", {pluralize(manifest.classes, 'class', 'classes')}" if manifest.classes else ""


def _pairs(value: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((key, _value(item)) for key, item in dotted_keys(value).items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
