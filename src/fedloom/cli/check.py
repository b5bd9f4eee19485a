"""``fedloom check``: everything that a run would refuse, and what the run will cost."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from fedloom.cli.options import ExperimentFile, Set, with_options
from fedloom.cli.results import CommandResult
from fedloom.core.memory import collection_paused
from fedloom.core.words import pluralize, rounded_up
from fedloom.engine.options import RunOptions
from fedloom.errors import FedloomError

TITLE_WIDTH, WIDTH = 10, 100
"""Characters of a line's title, and of a line."""

NEEDS = {
    "head": "there are layers before the last one",
    "linear head": "the last layer is linear",
    "features": "the input of the last layer can be used",
    "default loss": "the loss is the task's",
    "no buffers": "no buffer moves in training",
    "any vector": "any parameter vector is a valid model",
    "normalization": "there are normalization layers",
}
"""Requirements of methods on the model (``algorithms/requirements.py``), as met."""


@with_options(without=("resume", "replay", "publish", "report"))
def check_command(experiment: ExperimentFile, options: RunOptions, set_: Set = None) -> CommandResult:
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

        def show_others() -> None:
            for error in others:
                typer.echo(f"error: {error}", err=True)

        return CommandResult({"valid": False}, show_others, [first, *others])
    return CommandResult(facts, "\n".join(_wrapped(*line) for line in _lines(facts)))


def _wrapped(title: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - TITLE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{title:{TITLE_WIDTH}}" + f"\n{'':{TITLE_WIDTH}}".join(lines)


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from fedloom.reporting.words import human_bytes

    model, told, cost = facts["model"], facts["disclosure"], facts["estimate"]
    yield "valid", f"{facts['name']} can run; its folder would be {facts['folder']}."
    yield "data", _data(facts["data"])
    frozen = f" and {model['frozen']:,} frozen values" if model["frozen"] else ""
    passed = " The module has passed its check." if model["name"] == "module" else ""
    size = f"{pluralize(model['parameters'], 'parameter')}{frozen}: {human_bytes(model['bytes'])}"
    yield "model", f"{model['name']} has {size}.{passed}"
    yield "method", _method(facts)
    sent = f"in a round {_kinds(told['training'])}; " if told["training"] else ""
    sent += f"in an evaluation {_kinds(told['evaluation'])}"
    learned = "only sums over a cohort" if told["only_sums"] else "each client's answer"
    yield "told", f"Clients send {sent}. The aggregator gets {learned}."
    if (traffic := facts["communication"]) is not None:
        up, down = traffic["payload_up"], traffic["payload_down"]
        client, all_, total = (f"{human_bytes(up[key])} up and {human_bytes(down[key])} down" for key in up)
        yield "traffic", f"A round costs a client {client}, and the aggregator {all_}. All rounds: {total}."
    if facts["privacy"] is not None:
        yield "privacy", _privacy(facts["privacy"])
    if facts["failure"] is not None:
        yield "time", f"There is no estimate, because a first round with one client failed: {facts['failure']}"
    if cost is not None:
        workers = pluralize(cost["workers"], "worker") if cost["workers"] else "one process"
        total = "Without a limit" if cost["seconds"] is None else _range(*cost["seconds"])
        each = "" if cost["round_seconds"] is None else f"a round {cost['round_seconds']:.2g} s, "
        each += f"an evaluation {cost['evaluation_seconds']:.2g} s"
        yield "time", f"{total} with {workers} on this machine ({each}). Not counted: {', '.join(cost['leaves_out'])}."
        device = f", and {human_bytes(cost['device_bytes'])} of its device" if cost["device_bytes"] else ""
        processes = pluralize(cost["processes"], "process", "processes")
        yield "memory", f"Up to about {human_bytes(cost['process_bytes'])} a process{device}, in {processes}."


def _data(data: dict[str, Any]) -> str:
    place, examples = data["partition"], data["train_examples"]
    if place == "not given":
        return (
            f"Each client has data of its own, of {pluralize(data['classes'] or 0, 'class', 'classes')}. Their folders "
            "are not given, so neither they nor traffic and time are checked; add --data DIR, once for each folder. "
            "Without it only `fedloom aggregator` can run the experiment."
        )
    text = f"{pluralize(data['seen'], 'client')} of {data['dataset']} train and {data['unseen']:,} are held out"
    text += f"; {pluralize(data['classes'], 'class', 'classes')}." if data["classes"] else "."
    if examples is not None:
        ends = f"{examples['smallest']:,} to {examples['largest']:,}"
        text += f" A client has {examples['median']:g} training examples (median; from {ends})."
    where = {
        "own": "The clients' own folders match the experiment.",
        "created": "The partition has been created, and the run will use it.",
    }
    return f"{text} {where.get(place, f'The partition is at {place}.')}"


def _privacy(privacy: dict[str, Any]) -> str:
    if privacy["epsilon"] is None:
        return f"The ε for {privacy['of']} is not known before the run; see `fedloom privacy`."
    return (
        f"ε = {rounded_up(privacy['epsilon'])} at δ = {privacy['delta']:g} for {privacy['of']}, toward readers of the "
        f"models (noise multiplier {rounded_up(privacy['noise_multiplier'], 4)}); see `fedloom privacy`."
    )


def _method(facts: dict[str, Any]) -> str:
    method, rounds = facts["method"], facts["rounds"]
    met = ", ".join(NEEDS.get(need, need) for need in method["needs"])
    needs = f" The model meets the method's requirements: {met}." if met else ""
    states = " Clients keep a state between rounds." if method["keeps_states"] else ""
    if rounds == 0:
        return f"{method['name']} has no rounds, and the clients are evaluated once.{needs}"
    length = "rounds without a limit"
    if rounds is not None:
        length = f"{pluralize(rounds, 'round')} and {pluralize(facts['evaluations'], 'evaluation')}"
    cohort = pluralize(facts["clients_per_round"], "client")
    return f"{method['name']} trains {cohort} a round, in {length}.{states}{needs}"


def _kinds(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} ({count:,})" if count else kind for kind, count in counts.items())


def _range(low: float, high: float) -> str:
    """Return a range of seconds in the largest unit that fits both: ``About 3 to 5 minutes``."""
    units = (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0), ("seconds", 1.0))
    name, size = next(((name, size) for name, size in units if low >= 1.5 * size), units[-1])
    ends = dict.fromkeys(f"{max(1.0, value / size):.0f}" for value in (low, high))
    return f"About {' to '.join(ends)} {name}"
