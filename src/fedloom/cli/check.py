"""``fedloom check``: everything that a run would refuse, and what the run will cost."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from fedloom.cli.options import ExperimentFile, Json, Set, with_options
from fedloom.core.memory import collection_paused
from fedloom.core.words import pluralize, rounded_up
from fedloom.engine.options import RunOptions
from fedloom.errors import FedloomError

TITLE_WIDTH, WIDTH = 10, 100
"""Characters of a line's title, and of a line."""


@with_options(without=("resume", "replay", "publish", "report"))
def check_command(experiment: ExperimentFile, options: RunOptions, set_: Set = None, as_json: Json = False) -> None:
    """Check an experiment before its run: errors, data, traffic, privacy, time. Creates no run, and trains no model."""
    settings = None
    try:
        with collection_paused():
            from fedloom import experiment as experiments

            settings = experiments.load_experiment(experiment, set_ or ())
            from fedloom.engine.check import check_experiment, other_errors
        facts = check_experiment(settings, options)
    except FedloomError as first:  # it ends the command, like the run
        others = [] if settings is None else other_errors(settings, options, first)
        if as_json:
            errors = [
                {"message": error.message, "hint": error.hint, "key": error.key, "exit_code": int(error.exit_code)}
                for error in (first, *others)
            ]
            typer.echo(json.dumps({"valid": False, "exit_code": int(first.exit_code), "errors": errors}, indent=2))
        else:
            for error in others:
                typer.echo(f"error: {error}", err=True)
        raise
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for title, text in _lines(facts):
        lines = textwrap.wrap(text, WIDTH - TITLE_WIDTH, break_long_words=False, break_on_hyphens=False)
        typer.echo(f"{title:{TITLE_WIDTH}}" + f"\n{'':{TITLE_WIDTH}}".join(lines))


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "valid", f"{facts['name']} can run; its folder would be {facts['folder']}."
    yield "data", _data(facts["data"])
    yield "model", _model(facts["model"])
    yield "method", _method(facts)
    yield "told", _told(facts["disclosure"])
    if facts["communication"] is not None:
        yield "traffic", _traffic(facts)
    if facts["privacy"] is not None:
        yield "privacy", _privacy(facts["privacy"])
    yield from _cost(facts)


def _data(data: dict[str, Any]) -> str:
    place, examples = data["partition"], data["train_examples"]
    clients = f"{pluralize(data['seen'], 'client')} of {data['dataset']} train and {data['unseen']:,} are held out"
    text = f"{clients}; {pluralize(data['classes'], 'class', 'classes')}." if data["classes"] else f"{clients}."
    if examples is not None:
        text += (
            f" A client has {examples['median']:g} training examples (median; from {examples['smallest']:,} to "
            f"{examples['largest']:,})."
        )
    if place == "not yet":
        return (
            f"{text} Creating the partition would take long: `fedloom partition EXPERIMENT` creates it. Until then, "
            "the clients' data are not checked, and costs are not known."
        )
    where = {"own": "The clients' own folders match the experiment.", "created": "The partition has been created."}
    return f"{text} {where.get(place, f'The partition is at {place}.')}"


def _model(model: dict[str, Any]) -> str:
    from fedloom.reporting.words import human_bytes

    frozen = f" and {model['frozen']:,} frozen values" if model["frozen"] else ""
    text = f"{model['name']} has {pluralize(model['parameters'], 'parameter')}{frozen}: {human_bytes(model['bytes'])}."
    return f"{text} The module has passed its check." if model["name"] == "module" else text


def _method(facts: dict[str, Any]) -> str:
    method, rounds = facts["method"], facts["rounds"]
    needs = f" The model has what the method needs: {', '.join(method['needs'])}." if method["needs"] else ""
    states = " Clients keep a state between rounds." if method["keeps_states"] else ""
    if rounds == 0:
        return f"{method['name']} has no rounds, and the clients are evaluated once.{needs}"
    length = "rounds without a limit" if rounds is None else pluralize(rounds, "round")
    evaluations = "" if rounds is None else f" and {pluralize(facts['evaluations'], 'evaluation')}"
    cohort = pluralize(facts["clients_per_round"], "client")
    return f"{method['name']} trains {cohort} a round, in {length}{evaluations}.{states}{needs}"


def _told(disclosure: dict[str, Any]) -> str:
    def kinds(counts: dict[str, int]) -> str:
        return ", ".join(f"{kind} ({count:,})" if count else kind for kind, count in counts.items())

    training = f"in a round {kinds(disclosure['training'])}; " if disclosure["training"] else ""
    sums = "only sums over a cohort" if disclosure["only_sums"] else "each client's answer"
    return (
        f"Clients send numbers of these kinds: {training}in an evaluation {kinds(disclosure['evaluation'])}. The "
        f"aggregator learns {sums}."
    )


def _traffic(facts: dict[str, Any]) -> str:
    from fedloom.reporting.words import human_bytes

    up, down = facts["communication"]["payload_up"], facts["communication"]["payload_down"]

    def way(key: str) -> str:
        return f"{human_bytes(up[key])} up and {human_bytes(down[key])} down"

    total = "" if up["total"] is None else f" All rounds: {way('total')}."
    return f"A round costs a client {way('client_round')}, and the aggregator {way('round')}.{total}"


def _privacy(privacy: dict[str, Any]) -> str:
    if privacy["epsilon"] is not None:
        return (
            f"Readers of the models learn at most ε = {rounded_up(privacy['epsilon'])} at δ = {privacy['delta']:g} "
            f"about one of the {privacy['of']} (noise multiplier {rounded_up(privacy['noise_multiplier'], 4)}). "
            "`fedloom privacy` has the ε of other readers."
        )
    return f"The ε for {privacy['of']} is not known before the run; `fedloom privacy` computes it from given numbers."


def _cost(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from fedloom.reporting.words import human_bytes

    if facts["failure"] is not None:
        yield "time", f"There is no estimate, because a first round with one client failed: {facts['failure']}"
    if (estimate := facts["estimate"]) is None:
        return
    workers = pluralize(estimate["workers"], "worker") if estimate["workers"] else "one process"
    ranges = "each round" if estimate["seconds"] is None else _range(*estimate["seconds"])
    if estimate["seconds"] is None:
        ranges = f"{_range(estimate['round_seconds'], estimate['round_seconds'] * 1.5)} a round"
    yield (
        "time",
        f"{ranges} with {workers} on this machine (a round {estimate['round_seconds']:.2g} s, an evaluation "
        f"{estimate['evaluation_seconds']:.2g} s). Not counted: {', '.join(estimate['leaves_out'])}.",
    )
    device = f", and {human_bytes(estimate['device_bytes'])} of its device" if estimate["device_bytes"] else ""
    processes = pluralize(estimate["processes"], "process", "processes")
    yield "memory", f"About {human_bytes(estimate['process_bytes'])} for each of {processes}{device}."


def _range(low: float, high: float) -> str:
    """Return a range of seconds in the largest unit that fits both: ``about 3 to 5 minutes``."""
    units = (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0), ("seconds", 1.0))
    name, size = next(((name, size) for name, size in units if low >= 1.5 * size), units[-1])
    ends = [f"{max(1.0, value / size):.0f}" for value in (low, high)]
    return f"About {ends[0]} to {ends[1]} {name}" if ends[0] != ends[1] else f"About {ends[0]} {name}"
