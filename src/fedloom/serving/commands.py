"""``fedloom serve`` and ``personalize``: the models of a run for its clients and for newcomers, without training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from fedloom.cli.completion import complete_runs
from fedloom.cli.options import Checkpoint, ClientAccess, OtherPartition, ServerAccess, refuse_options, with_options
from fedloom.cli.results import CommandResult
from fedloom.core.processes import termination_requested
from fedloom.core.words import pluralize, rounded_up
from fedloom.engine.options import ProbeOptions

if TYPE_CHECKING:
    from fedloom.privacy.spent import PrivacyGuarantee

Format = Literal["safetensors", "pt2", "onnx", "peft"]
"""Formats of models, ``serving.personal_model.FORMATS``, whose module imports torch."""


@with_options()
def serve_command(
    probes: ProbeOptions,
    access: ServerAccess,
    run: Annotated[
        str,
        typer.Argument(
            help="The run's folder, or the URL where it is published.",
            metavar="RUN|URL",
            autocompletion=complete_runs,
        ),
    ],
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7734",
    follow: Annotated[
        bool, typer.Option("--follow", help="Switch to each newer round of the run as soon as it has a checkpoint.")
    ] = False,
    checkpoint: Checkpoint = "last",
    rest: Annotated[
        str | None,
        typer.Option(
            help="Also serve predictions of the clients' saved models on this address, by the Open Inference Protocol "
            "over HTTP (docs/serving.md).",
            metavar="HOST:PORT",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a setting: wait_s, linger_s, queue, conversations, deadline_s, drain_s, "
            "share_port, models, model_name, models_kept, body_bytes (docs/serving.md); repeatable.",
        ),
    ] = None,
) -> None:
    """Serve models to clients. They request them with `fedloom personalize HOST:PORT`."""
    from fedloom.core.urls import is_url
    from fedloom.runs.folder import RunFolder

    if not is_url(run):
        RunFolder.open(run)  # fail early, before torch is imported
    from fedloom.core.address import split_address
    from fedloom.experiment import settings_of
    from fedloom.security.options import Protection
    from fedloom.serving.serve import serve_run
    from fedloom.transport.personalization import ModelServerSettings

    settings = settings_of(ModelServerSettings, set_ or (), "the server")
    host, _ = split_address(listen, what="--listen", lowest=0)
    protection = Protection(access.options())
    protection.check(host)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if termination_requested.is_set():
        stop.set()
    handed_out = serve_run(
        run,
        listen,
        checkpoint=checkpoint,
        follow=follow,
        settings=settings,
        protection=protection,
        audit=probes.audit,
        stop=stop,
        started=lambda address: typer.echo(f"serving models of {run} at {address}"),
        say=lambda text: typer.echo(text, err=True),
        health=probes.health,
        metrics=probes.metrics,
        rest=rest,
    )
    typer.echo(f"{pluralize(handed_out, 'model')} handed out")


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
            autocompletion=complete_runs,
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
    partition: OtherPartition = None,
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
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="predictor (personal; or global); for the models of the run's clients, format (safetensors; or pt2, "
            "onnx, peft); for one model, timeout_s (seconds to wait for a server's; 60) and, with --epsilon, delta (δ: "
            "1e-5; below 1/n for n examples, and at most 0.01) and clip (largest norm of an example's embedding; by "
            "default the run's); repeatable.",
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
) -> CommandResult:
    """Create and save models for clients, which need not have taken part in training."""
    from fedloom.errors import ExperimentError, QuorumError

    settings = _request_settings(set_ or ())
    if out.suffix[1:] not in get_args(Format):
        of_privacy = {"--epsilon": epsilon, "--ledger": ledger, "--budget": budget}
        of_one = {f"--set {key}": key for key in settings.keys() - {"predictor", "format"}} | of_privacy
        refuse_options(of_one, f"is for one model; give a file as --out (got {out}).")
        predictor, form = settings.get("predictor", "personal"), settings.get("format", "safetensors")
        from fedloom.runs.folder import RunFolder

        RunFolder.open(where)  # fail early, before torch is imported
        from fedloom.serving.client_models import save_models

        made = save_models(Path(where), out, checkpoint, partition, clients, data or (), predictor, f".{form}")
        for client, reason in made.lost.items():
            typer.echo(f"{client} got no model: {reason}", err=True)
        everyone = pluralize(len(made.saved) + len(made.lost), "client")
        failures = [QuorumError(f"{len(made.lost)} of {everyone} got no model")] if made.lost else []
        facts = {"folder": out, "saved": made.saved, "lost": made.lost}
        return CommandResult(facts, f"{pluralize(len(made.saved), 'model')} in {out}", failures)
    of_all = {"--partition": partition, "--clients": clients, "--set format": settings.get("format")}
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
        ledger=ledger,
        budget=budget,
        credentials=access.credentials,
        insecure=access.insecure,
        **settings,
    )
    files, card = model.save(out), model.card
    lines = [*map(str, files), f"the model of {card.client}: {card.run}, round {card.round} ({card.digest[:12]})"]
    if card.training_privacy is not None:
        lines.append(f"trained {card.training_privacy}")
    if card.privacy is not None:
        lines += _guaranteed(card.privacy, ledger)
    return CommandResult({"files": files, "card": card}, "\n".join(lines))


def _guaranteed(guarantee: PrivacyGuarantee, ledger: Path | None) -> Iterator[str]:
    """Yield sentences about the privacy of a request, and of all in the ledger."""
    yield (
        f"the data disclosed about its {pluralize(guarantee.examples, 'example')}: ({rounded_up(guarantee.epsilon)}, "
        f"{rounded_up(guarantee.delta)})-differentially private, replacing one; each further model costs as much again"
    )
    if guarantee.total_epsilon is not None and guarantee.total_delta is not None:
        trainings = f"{pluralize(guarantee.trainings, 'training')} and " if guarantee.trainings else ""
        yield (
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
        format: Format = "safetensors"
        timeout_s: float = Field(default=60.0, ge=0.1)
        delta: float | None = None
        clip: float | None = None

    return settings_of(RequestSettings, overrides, "the request").model_dump(exclude_unset=True)
