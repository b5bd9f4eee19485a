"""``fedloom privacy`` and ``fedloom ledger``: the privacy that a training will cost, and what a client has spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import ExperimentFile, Set, with_options
from fedloom.cli.results import CommandResult
from fedloom.core.words import pluralize, rounded_up
from fedloom.engine.options import PrivacyQuestion

if TYPE_CHECKING:
    from fedloom.ledger.ledger import LedgerContent
    from fedloom.ledger.privacy_cost import PrivacyCost


@with_options()
def privacy_command(experiment: ExperimentFile, question: PrivacyQuestion, set_: Set = None) -> CommandResult:
    """Show what the privacy of a training costs: its ε, the noise that an ε needs, and its effect. Trains nothing."""
    from fedloom import experiment as experiments

    settings = experiments.load_experiment(experiment, set_ or ())
    from fedloom.ledger.privacy_cost import cost_of

    found = cost_of(settings, question)
    title = f"{settings.name} · {settings.algorithm.name} · privacy of {found.unit}"
    return CommandResult(found.as_json(), lambda: _show(found, title))


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


# --- ledger -----------------------------------------------------------------------------------------------------------


def ledger_command(
    file: Annotated[
        Path, typer.Argument(help="The ledger; created with --training if it does not exist.", metavar="FILE")
    ],
    training: Annotated[
        list[str] | None,
        typer.Option(
            help="First count this training, in which the ledger's owner took part: a run's folder or URL, or its "
            "summary.json. Counted once; may be repeated.",
            metavar="RUN|FILE",
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="With --training, the owner's id in that run: from a folder or URL, its own noisy steps are counted.",
            metavar="ID",
        ),
    ] = None,
) -> CommandResult:
    """Show the total ε that a ledger's trainings and requests have spent on one training example."""
    from fedloom.errors import ExperimentError

    if client is not None and not training:
        raise ExperimentError("--client needs --training.", key="client")
    from fedloom.ledger.ledger import PrivacyAccountant

    accountant = PrivacyAccountant(file)
    if training:
        from fedloom.ledger.training_cost import training_claimed

        for claimed in [training_claimed(where, client) for where in training]:
            if not accountant.add_training(claimed):
                typer.echo(f"{claimed.run} has been counted already", err=True)
    found = accountant.content()
    return CommandResult(_ledger_json(found), lambda: _show_ledger(file, found))


def _ledger_json(found: LedgerContent) -> dict[str, Any]:
    total = found.total
    return {
        "unit": "examples",
        "neighbouring": "replace-one",
        "epsilon": total.epsilon,
        "delta": total.delta,
        "basic": total.is_basic,
        "trainings": [{key: each for key, each in line.items() if key != "digest"} for line in found.trainings],
        "requests": [{key: each for key, each in line.items() if key != "digest"} for line in found.requests],
    }


def _show_ledger(file: Path, found: LedgerContent) -> None:
    from fedloom.cli.tables import print_paragraph, print_table
    from fedloom.ledger.ledger import TRAINING_VERSION

    rows = []
    for line in found.lines:
        is_training = line["version"] == TRAINING_VERSION
        what = f"training, private for {line['unit']}" if is_training else "descriptor"
        rows.append((str(line["time"])[:10], what, str(line.get("run", "")), rounded_up(line["epsilon"])))
    print_table(str(file), ("date", "what", "run", "stated ε"), rows, texts=(0, 1, 2))
    total = found.total
    typer.echo(f"\nin total ε = {rounded_up(total.epsilon)} at δ = {rounded_up(total.delta)}\n")
    for sentence in _sentences(found, is_basic=total.is_basic):
        print_paragraph(sentence)


def _sentences(found: LedgerContent, *, is_basic: bool) -> list[str]:
    sentences = [
        "The total is for replacing one training example by another, toward anyone who sees the descriptors and the "
        "trained models."
    ]
    if any(line["neighbouring"] == "add-or-remove-one" for line in found.trainings):
        sentences.append(
            "Replacing an example reveals more than adding or removing one, for which a training with Poisson samples "
            "states its ε."
        )
    if any(line["unit"] == "clients" for line in found.trainings):
        sentences.append(
            "A training that protects a whole client also protects each of its examples, and is counted as such."
        )
    if found.trainings:
        sentences.append("The aggregator of a training may learn more than readers do: see the run's claim.")
    if is_basic:
        claims = sum(line["releases"] is None for line in found.trainings)
        sentences.append(
            f"The mechanism of {pluralize(claims, 'training')} is not known, so its ε and δ were added (basic "
            "composition), after conversion to replacing one. Count it from the run's folder for a smaller total."
        )
    return sentences
