"""``fedloom privacy``: cost of the privacy of a training, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import ExperimentFile, Json, Set
from fedloom.core.words import rounded_up

if TYPE_CHECKING:
    from fedloom.runner.privacy_cost import PrivacyCost


def privacy_command(
    experiment: ExperimentFile,
    set_: Set = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of training clients; by default as the experiment says.", metavar="N")
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="For privacy of examples: training examples of the smallest client; by default from the partition.",
            metavar="N",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Find the noise for this ε; with --noise-multiplier, the rounds.", metavar="E")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Find the ε of this noise multiplier.", metavar="Z")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds, instead of the experiment's.", metavar="N")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Ledger of a client that would take part: also show its total with this training.", metavar="FILE"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the privacy of a training costs: its ε, the noise that an ε needs, and its effect. Trains nothing."""
    import json

    from fedloom import experiment as experiments

    settings = experiments.load_experiment(experiment, set_ or ())
    from fedloom.runner.privacy_cost import PrivacyQuestion, cost_of

    found = cost_of(settings, PrivacyQuestion(clients, examples, epsilon, noise_multiplier, rounds, ledger))
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found, f"{settings.name} · {settings.algorithm.name} · privacy of {found.unit}")


def _show(found: PrivacyCost, title: str) -> None:
    from fedloom.cli.tables import print_table

    rounds = "over ten million" if found.rounds is None else f"{found.rounds:,}"
    asked = "" if found.asked_epsilon is None else f" for ε = {found.asked_epsilon:g}"
    typer.echo(title)
    typer.echo(
        f"noise multiplier {rounded_up(found.noise_multiplier, 4)}, clipping norm {found.clip:g}, δ = {found.delta:g}, "
        f"{rounds} rounds{asked}\n"
    )
    print_table(
        "",
        ("rounds", "ε (readers)", "ε (members)", "ε (aggregator)"),
        [
            (
                f"{at.rounds:,}",
                rounded_up(at.to_readers),
                *("none" if found is None else rounded_up(found) for found in (at.to_members, at.to_aggregator)),
            )
            for at in found.by_rounds
        ],
        texts=(),
    )
    typer.echo()
    for sentence in found.statement:
        typer.echo(sentence)
