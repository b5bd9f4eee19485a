"""``fedloom worker --dry-run``: list the data that would leave the clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fedloom.cli.tables import print_table

if TYPE_CHECKING:
    from fedloom.privacy.settings import TrainingPrivacy
    from fedloom.runner.disclosure import DisclosedTensor
    from fedloom.runner.worker import WorkerOptions


SUMMED = (
    "Secure aggregation: the aggregator receives the quantities marked `only in sums` as integers under random masks, "
    "and can read only their sum over three clients or more. It also receives public keys, signatures, encrypted "
    "shares of random secrets, and checksums (docs/secure-sums.md). Other clients of a sum learn this client's id and "
    "public key."
)
"""Sentences about answers that are only summed."""


def show_disclosure(options: WorkerOptions, experiment: str | None) -> None:
    """Show the data that a worker would send about its packed clients; send nothing."""
    from fedloom import experiment as experiments
    from fedloom.algorithms.base import available, find_algorithm
    from fedloom.data.own import OwnClients
    from fedloom.errors import ExperimentError
    from fedloom.evaluation.plan import EvaluationPlan
    from fedloom.runner.disclosure import announcements, answers, is_measured, measures, moment_tensors, of_experiment
    from fedloom.runner.worker import check_only_sums

    if not (options.data or options.observe):
        raise ExperimentError("--dry-run needs --data or --observe.", key="dry_run")
    clients = OwnClients.open(options.data, options.observe)
    e = None if experiment is None else experiments.load_experiment(experiment)
    if e is not None:
        if options.only_sums:
            check_only_sums(e.federation.secure_aggregation, e.federation.clients_per_round)
        trained, measured = of_experiment(e, clients)
    typer.echo("The worker sends the aggregator its name, device and versions, and for each client")
    for announcement in announcements(clients, class_counts=options.class_counts):
        typer.echo(f"  {json.dumps(announcement)}")
    if is_measured(e, clients):
        secure = e is not None and e.federation.secure_aggregation is not None
        _show("\nOnce, if normalization is measured, for training clients", moment_tensors(only_summed=secure))
    if e is None:
        classes = next(iter(clients.cards.values())).spec.classes
        for name in available():
            _show(f"\n{name}: in training and personalization", answers(find_algorithm(name)))
        _show("\nAll methods: in evaluations, with two predictors", measures(2, EvaluationPlan.of_classes(classes)))
        typer.echo("\nFor the sizes of models, and what secure aggregation hides, give --experiment FILE.")
    else:
        _show(f"\n{e.algorithm.name}: in training and personalization", trained)
        _show("\nIn evaluations", measured)
        if any(one.only_summed for one in (*trained, *measured)):
            typer.echo(f"\n{SUMMED}")
        if e.federation.privacy is not None:
            typer.echo(f"\n{_noise(e.federation.privacy)}")
    typer.echo(
        "\nA client that cannot answer sends the reason, in a sentence. Nothing else leaves the client. This command "
        "has sent nothing."
    )


def _noise(privacy: TrainingPrivacy) -> str:
    """Return sentences about what clients do to their answers for differential privacy."""
    if privacy.of == "examples":
        return (
            "Privacy of examples: updates follow from gradients that are clipped, and get noise, at the client. Losses "
            "of training are sent as 0. Metrics have no noise."
        )
    noise = (
        "the aggregator adds noise to their sum"
        if privacy.noise == "central"
        else "each client adds a share of the noise"
    )
    start = "" if privacy.adaptive_clip is None else " at the start"
    return (
        f"Privacy of clients: updates are clipped to norm {privacy.clip:g}{start} at the client, and {noise}. Losses, "
        "counts and metrics have no noise."
    )


def _show(title: str, tensors: Sequence[DisclosedTensor]) -> None:
    headings = ["message", "quantity", "shape", "numbers"]
    rows = [
        [f"{one.message}.{one.field}", one.quantity, f"[{', '.join(map(str, one.shape))}]", _count(one)]
        for one in tensors
    ]
    if any(one.only_summed for one in tensors):
        headings.append("known")
        for row, one in zip(rows, tensors, strict=True):
            row.append("only in sums" if one.only_summed else "individually")
    typer.echo(title if rows else f"{title}: nothing")
    if rows:
        print_table("", headings, rows, texts=(0, 1, 2, 4))


def _count(one: DisclosedTensor) -> str:
    return "" if one.numbers is None else f"{one.numbers:,}"
