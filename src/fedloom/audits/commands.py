"""``fedloom audit``: attacks on a run, or on a training with canaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedloom.cli.completion import complete_runs
from fedloom.cli.options import Checkpoint, OwnFolders, Set, refuse_options
from fedloom.cli.results import CommandResult
from fedloom.core.words import pluralize


def audit_command(
    where: Annotated[
        str,
        typer.Argument(
            help="The run's folder; with --canaries an experiment file.",
            metavar="RUN|EXPERIMENT",
            autocompletion=complete_runs,
        ),
    ],
    canaries: Annotated[
        int | None,
        typer.Option(
            help="Run the experiment with this many canaries, each included by a fair coin flip, and guess which are.",
            metavar="M",
        ),
    ] = None,
    of: Annotated[
        Literal["clients", "examples"], typer.Option(help="With --canaries, the kind of canaries.")
    ] = "clients",
    norm: Annotated[
        float | None,
        typer.Option(
            help="With --canaries of clients, the norm of their updates before clipping; by default ten times the "
            "clipping norm of federation.privacy, or the norm of an honest update.",
            metavar="C",
        ),
    ] = None,
    set_: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --canaries, a new folder for partition, coins and run; by default "
            "runs/NAME-ALGORITHM-seedN-audit.",
            metavar="DIR",
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="With --canaries, the partition to add them to: a folder or URL.", metavar="DIR|URL"),
    ] = None,
    checkpoint: Checkpoint = "last",
    data: OwnFolders = None,
) -> CommandResult:
    """Attack a run: membership inference, canaries. Results go to audit.json and the report."""
    from fedloom.errors import ExperimentError
    from fedloom.runs.files import AUDIT
    from fedloom.runs.folder import RunFolder

    if canaries is None:
        of_canaries = {"--norm": norm, "--set": set_ or None, "--out": out, "--partition": partition}
        refuse_options(of_canaries, "needs --canaries.")
        if Path(where).is_file():
            raise ExperimentError(f"{where} is an experiment; give --canaries to audit it.", key="canaries")
        RunFolder.open(where)  # fail early, before torch is imported
        from fedloom.audits.run_audit import audit_run

        run = Path(where)
        audit_run(run, checkpoint, data or ())
    else:
        refuse_options({"--checkpoint": checkpoint != "last"}, "is for a run, and --canaries for an experiment.")
        from fedloom import experiment as experiments
        from fedloom.api.watch import Watch
        from fedloom.audits.canary_audit import CanaryOptions, audit_with_canaries

        options = CanaryOptions(canaries, of, out, partition, norm, data=tuple(data or ()))
        run = audit_with_canaries(experiments.load_experiment(where, set_ or ()), options, Watch())
    return CommandResult(RunFolder.open(run).json(AUDIT), lambda: show_audit(run))


def show_audit(run: Path) -> None:
    """Print what a run's ``audit.json`` found."""
    from fedloom.runs.files import AUDIT
    from fedloom.runs.folder import RunFolder

    document = RunFolder.open(run).json(AUDIT)
    for part, show in (("membership", _show_membership), ("canaries", _show_canaries)):
        if part in document:
            show(document[part], document["claim"])
            typer.echo()
    typer.echo(f"audit: {run / AUDIT}")


def _show_membership(found: Mapping[str, Any], claim: Mapping[str, Any] | None) -> None:
    from fedloom.cli.tables import print_paragraph, print_table
    from fedloom.reporting.words import shown_bound

    rows = [
        (
            f"{name}, {group} clients",
            f"{result['auc']:.3f}",
            f"{result['auc_clients']['highest']:.3f}",
            f"{100 * result['tpr_at_low_fpr']:.1f}",
            shown_bound(result["epsilon"]),
        )
        for name, groups in found["predictors"].items()
        for group, result in groups.items()
        if result is not None
    ]
    print_table(
        f"Membership inference by loss, round {found['round']}",
        ("model", "AUC", "highest", "TPR, %", "ε ≥"),
        rows,
    )
    print_paragraph(
        "Training against test examples of the same clients. AUC: 0.5 is chance level. Highest: AUC of the client with "
        "the highest one. TPR: at a false positive rate of 1 %. ε: lower bound with "
        f"{100 * found['confidence']:g} % confidence at δ = {found['delta']:g}, if examples are independent."
    )


def _show_canaries(found: Mapping[str, Any], claim: Mapping[str, Any] | None) -> None:
    from fedloom.cli.tables import print_paragraph
    from fedloom.reporting.words import audit_verdict, estimate_note, sampling_note, shown_bound

    guesses = found["guesses_in"] + found["guesses_out"]
    typer.echo(
        f"Canaries: {pluralize(found['canaries'], found['of'].removesuffix('s'))}, {found['in']} in; "
        f"{found['right']} of {pluralize(guesses, 'guess', 'guesses')} right"
    )
    typer.echo(
        f"  ε at least {shown_bound(found['epsilon'])} with {100 * found['confidence']:g} % confidence at δ = "
        f"{found['delta']:g}; this number of canaries can show up to {shown_bound(found['largest_bound'])}"
    )
    if found.get("normal_estimate") is not None:
        typer.echo(f"  {estimate_note(found['normal_estimate'])}")
    if "sampling" in found:
        typer.echo(f"  {sampling_note(found['sampling'])}")
    print_paragraph(audit_verdict(found, claim))
