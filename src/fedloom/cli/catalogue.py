"""``fedloom methods``, ``models``, ``schemes`` and ``tasks``: choices for an experiment file."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

import typer

from fedloom.cli.results import CommandResult

if TYPE_CHECKING:
    from fedloom.core.settings import Settings


def methods_command() -> CommandResult:
    """List the methods, with their papers, what they need, and what can protect their clients."""
    from fedloom.algorithms.catalogue import PROTECTIONS, method_entries
    from fedloom.cli.tables import print_table
    from fedloom.tasks.registry import OWN_TASKS

    entries = method_entries()
    rows = [
        [
            entry.name,
            entry.summary,
            entry.arxiv or "",
            "all" if len(entry.tasks) >= len(OWN_TASKS) else ", ".join(entry.tasks),
            ", ".join(entry.needs),
            *("no" if protection in entry.without else "yes" for protection in PROTECTIONS),
        ]
        for entry in entries
    ]
    headings = ["algorithm.name", "method", "arXiv", "tasks", "needs", *PROTECTIONS]

    def show() -> None:
        print_table("", headings, rows, texts=range(len(headings)))
        typer.echo("\n--json gives the reasons. Each method has a page in docs/algorithms, with its keys.")

    return CommandResult(entries, show)


def models_command() -> CommandResult:
    """List the models, with the inputs that they accept and their keys."""
    from fedloom.models.registry import ModelSettings

    return _choices("model.name", get_args(ModelSettings), accepts="takes")


def schemes_command() -> CommandResult:
    """List the schemes that assign the examples of a data set to clients, with their keys."""
    from fedloom.data.schemes import Scheme

    return _choices("data.partition.scheme", get_args(get_args(Scheme)[0]))


def tasks_command() -> CommandResult:
    """List the prediction tasks, with their keys."""
    from fedloom.tasks.registry import TASKS

    return _choices("task.name", [type(task) for task in TASKS])


def _choices(key: str, choices: Iterable[type[Settings]], accepts: str = "") -> CommandResult:
    """Return the classes that a key of an experiment chooses between: names, sentences, inputs and further keys."""
    from fedloom.cli.tables import print_table
    from fedloom.core.words import first_sentence

    own = key.rpartition(".")[2]
    entries: list[dict[str, Any]] = []
    for choice in choices:
        fields = choice.model_fields
        entry = {"name": get_args(fields[own].annotation)[0], "summary": first_sentence(choice.__doc__ or "")}
        inputs = {"inputs": getattr(choice, accepts)} if accepts else {}
        keys = {name: field.description for name, field in fields.items() if name != own}
        entries.append({**entry, **inputs, "keys": keys})
    entries.sort(key=operator.itemgetter("name"))
    headings = [key, "description", *(["inputs"] if accepts else []), "keys"]
    rows = [[each if isinstance(each, str) else ", ".join(each) for each in entry.values()] for entry in entries]

    def show() -> None:
        print_table("", headings, rows, texts=range(len(headings)))
        typer.echo("\nKeys with their values: docs/keys, or --json")

    return CommandResult(entries, show)
