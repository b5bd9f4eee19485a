"""Commands for trained runs: ``fedloom evaluate``, ``personalize``, ``report``, ``compare`` and ``runs``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import Checkpoint, ClientAccess, Json, refuse_options, with_options
from fedloom.core.words import pluralize, rounded_up
from fedloom.tasks.names import ACCURACY, metric_title

if TYPE_CHECKING:
    from fedloom.runs.listing import RunEntry

Run = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]
Other = Annotated[
    str | None,
    typer.Option(
        "--partition", metavar="DIR|URL", help="Use the clients of another partition of the same kind of data."
    ),
]
OwnFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="For a run with data.own: a packed client, or a folder of packed clients; repeatable.",
    ),
]


def evaluate_command(
    run: Run,
    checkpoint: Checkpoint = "last",
    partition: Other = None,
    data: OwnFolders = None,
    out: Annotated[Path | None, typer.Option(help="Write the statistics as JSON to this file.")] = None,
) -> None:
    """Evaluate a trained model again. The clients are the run's, or those of another partition."""
    from fedloom.runs.folder import RunFolder

    RunFolder.open(run)  # fail early, before torch is imported
    from fedloom.cli.tables import print_results
    from fedloom.engine import trained

    statistics = trained.evaluate(run, checkpoint, partition, data or ()).statistics
    print_results(statistics)  # print first, so that the results survive a failure to write the file
    if "overlap" in statistics and (warning := overlapping(statistics["overlap"])):
        print(f"warning: {warning}", file=sys.stderr)
    if out is not None:
        from fedloom.errors import StorageError
        from fedloom.storage.folder import write_atomically

        try:
            write_atomically(out, (json.dumps(statistics, indent=2) + "\n").encode())
        except StorageError as error:
            raise StorageError(error.message, hint="choose another file with --out") from error


def overlapping(found: Mapping[str, Any] | None) -> str | None:
    """Return a warning about new clients whose examples the run was trained on; None if there are none."""
    if found is None:
        return (
            "it is unknown whether the run was trained on examples of these clients: its partition is not in the "
            "data root (create it with `fedloom partition RUN/experiment.yaml`)"
        )
    if not found["clients"]:
        return None
    split = ", ".join(f"{found[name]:,} {name}" for name in ("train", "validation", "test") if found[name])
    return (
        f"these clients are not all new: the run was trained on {split} examples of "
        f"{pluralize(found['clients'], 'client')}; data.partition.reserve holds examples back for new clients"
    )


@with_options()
def personalize_command(
    access: ClientAccess,
    where: Annotated[
        str,
        typer.Argument(
            help=(
                "The run's folder; for one model also its URL, or the HOST:PORT of `fedloom serve` or of an aggregator."
            ),
            metavar="RUN|URL|HOST:PORT",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="A file (.safetensors, .pt2, .onnx) or the folder of an adapter (.peft): one model, for a packed "
            "client that took no part in the run. Any other new folder: the models of the run's clients, "
            "ID.safetensors with ID.md.",
            metavar="FILE|DIR",
        ),
    ],
    checkpoint: Checkpoint = "last",
    partition: Other = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="The packed client; for a folder and a run with data.own, also a folder of packed clients; "
            "repeatable.",
        ),
    ] = None,
    clients: Annotated[str | None, typer.Option(help="Ids, separated by commas; by default all.")] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of the models of the run's clients: safetensors, pt2, onnx or peft; by default safetensors.",
            metavar="FORMAT",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="predictor (personal; or global), timeout_s (seconds to wait for a server's model; 60), delta (with "
            "--epsilon, δ: 1e-5; below 1/n for n examples, and at most 0.01); repeatable.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="ε, above 0, of the (ε, δ)-differential privacy of the data disclosed to the server; inf adds no "
            "noise. By default as in the run's training.",
            metavar="E",
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            help="With --epsilon, the largest norm of an example's embedding; by default the run's.", metavar="C"
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="With --epsilon, the file that records the privacy spent by requests; created if it does not exist.",
            metavar="FILE",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="With --ledger, the largest total ε of its requests; a request that would exceed it is refused "
            "before anything is disclosed.",
            metavar="E",
        ),
    ] = None,
) -> None:
    """Create and save models for clients, which need not have taken part in training."""
    from fedloom.errors import ExperimentError

    settings = _request_settings(set_ or ())
    formats = ("safetensors", "pt2", "onnx", "peft")  # runner.personal_model.FORMATS, which imports torch
    if form is not None and form not in formats:
        raise ExperimentError(
            f"--format must be one of {', '.join(formats)} (got {form}).", key="format", found=form, allowed=formats
        )
    if out.suffix[1:] not in formats:
        of_privacy = {"--epsilon": epsilon, "--clip": clip, "--ledger": ledger, "--budget": budget}
        of_one = {f"--set {key}": key for key in settings.keys() - {"predictor"}} | of_privacy
        refuse_options(of_one, f"is for one model; give a file as --out (got {out}).")
        predictor = settings.get("predictor", "personal")
        _save_models(where, out, checkpoint, partition, clients, data or (), predictor, form or formats[0])
        return
    of_all = {"--partition": partition, "--clients": clients, "--format": form}
    refuse_options(
        of_all, f"is for a folder of models, and --out is one model, {out}; give --data DIR, one packed client."
    )
    if data is None or len(data) != 1:
        raise ExperimentError(f"--out is one file, {out}: give one packed client with --data.", key="data", found=data)
    import fedloom

    model = fedloom.personalize(
        where,
        data=data[0],
        checkpoint=checkpoint,
        epsilon=epsilon,
        clip=clip,
        ledger=ledger,
        budget=budget,
        credentials=access.credentials,
        insecure=access.insecure,
        **settings,
    )
    for path in model.save(out):
        typer.echo(f"{path}")
    card = model.card
    typer.echo(f"the model of {card.client}: {card.run}, round {card.round} ({card.digest[:12]})")
    if card.training_privacy is not None:
        typer.echo(f"trained {card.training_privacy}")
    if (guarantee := card.privacy) is None:
        return
    typer.echo(
        f"the data disclosed about its {pluralize(guarantee.examples, 'example')}: ({rounded_up(guarantee.epsilon)}, "
        f"{rounded_up(guarantee.delta)})-differentially private, replacing one; each further model costs as much again"
    )
    if guarantee.total_epsilon is not None and guarantee.total_delta is not None:
        trainings = f"{pluralize(guarantee.trainings, 'training')} and " if guarantee.trainings else ""
        typer.echo(
            f"in total, after {trainings}{pluralize(guarantee.requests or 0, 'request')} in {ledger}: "
            f"({rounded_up(guarantee.total_epsilon)}, {rounded_up(guarantee.total_delta)})"
        )


def _request_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the rare arguments of a request that ``--set`` gives."""
    from pydantic import Field

    from fedloom.core.settings import Settings
    from fedloom.experiment import settings_of

    class RequestSettings(Settings):
        """Rare arguments of :func:`fedloom.personalize`."""

        predictor: str = "personal"
        timeout_s: float = Field(default=60.0, ge=0.1)
        delta: float | None = None

    return settings_of(RequestSettings, overrides, "the request").model_dump(exclude_unset=True)


def _save_models(
    run: str,
    out: Path,
    checkpoint: str,
    partition: str | None,
    clients: str | None,
    data: Sequence[Path],
    predictor: str,
    form: str,
) -> None:
    """Save the models of a run's clients, or of another partition's."""
    from fedloom.errors import QuorumError
    from fedloom.runs.folder import RunFolder

    RunFolder.open(run)  # fail early, before torch is imported
    from fedloom.serving.client_models import save_models

    made = save_models(Path(run), out, checkpoint, partition, clients, data, predictor, f".{form}")
    typer.echo(f"{pluralize(len(made.saved), 'model')} in {out}")
    for client, reason in made.lost.items():
        typer.echo(f"{client} got no model: {reason}", err=True)
    if made.lost:
        everyone = pluralize(len(made.saved) + len(made.lost), "client")
        raise QuorumError(f"{len(made.lost)} of {everyone} got no model")


def report_command(run: Run) -> None:
    """Write a run's report.html and figures/ from its other files."""
    from fedloom.reporting.report import write_report

    typer.echo(f"report: {write_report(run)}")


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of finished runs, or folders that contain finished runs.", metavar="RUN..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write compare.html, .csv, .tex and figures to this folder.", metavar="DIR"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Baseline for the tests: a method or a row; by default the best on validation.",
            metavar="NAME",
        ),
    ] = None,
) -> None:
    """Compare runs. Runs that differ only in the seed form one row."""
    from fedloom.cli.tables import show_comparison

    show_comparison(runs, out, against)
    if out is not None:
        typer.echo(f"comparison: {out / 'compare.html'}")


def runs_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder that holds runs, at any depth.", metavar="[DIR]", show_default=True)
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs. Shows progress, method, data set, and the mean test result over clients."""
    import dataclasses

    from fedloom.cli.tables import print_table
    from fedloom.runs.listing import list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(run) for run in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(f"no runs in {folder} or below it")
        return
    headings = ("run", "method", "data", "rounds", "seen %", "unseen %", "state", "last change")
    print_table(
        f"{pluralize(len(found), 'run')} in {folder}",
        headings,
        [_row(run, folder) for run in found],
        texts=(0, 1, 2, 6, 7),
    )
    for run in found:
        if run.fault is not None:
            typer.echo(f"damaged: {run.fault}", err=True)


def _row(run: RunEntry, folder: Path) -> tuple[str, ...]:
    import time

    where = str(Path(run.path).relative_to(folder)) if Path(run.path) != folder else folder.resolve().name
    when = "" if run.changed is None else time.strftime("%m-%d %H:%M", time.localtime(run.changed))
    rounds = "" if run.done is None else f"{run.done}" if run.rounds is None else f"{run.done}/{run.rounds}"
    groups = (_score(run, run.seen), _score(run, run.unseen))
    return (where, run.method or "", run.dataset or "", rounds, *groups, run.state, when)


def _score(run: RunEntry, value: float | None) -> str:
    """Return a value of the headline metric: an accuracy in percent, or another metric with its name."""
    if value is None or run.metric is None:
        return "–"
    shown = f"{100 * value:.1f}" if run.percent else f"{value:.3g}"
    return shown if run.metric == ACCURACY.name else f"{metric_title(run.metric)} {shown}"
