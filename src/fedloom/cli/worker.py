"""``fedloom worker``: serve clients to an aggregator, or list what would leave them."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import ClientAccess, Json, act_at_eof, refuse_options, with_options
from fedloom.cli.results import CommandResult
from fedloom.core.memory import collection_paused
from fedloom.core.processes import termination_requested
from fedloom.engine.options import WorkerOptions

if TYPE_CHECKING:
    from fedloom.engine.disclosure import DisclosedTensor
    from fedloom.privacy.settings import TrainingPrivacy


@with_options()
def worker_command(
    options: WorkerOptions,
    access: ClientAccess,
    aggregator: Annotated[
        str | None, typer.Option(help="The aggregator's address.", metavar="HOST:PORT", show_default="required")
    ] = None,
    dry_run: Annotated[
        str | None,
        typer.Option(
            help="Show the data that these clients would send in an experiment, or with any method, and send nothing.",
            metavar="EXPERIMENT|any",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Unique name; by default host and process id.")] = None,
    as_json: Json = False,
) -> CommandResult | None:
    """Serve clients of a partition, or clients with their own data, to an aggregator."""
    import socket

    from fedloom import experiment as experiments
    from fedloom.core import processes
    from fedloom.core.home import expanded
    from fedloom.core.plugins import capability
    from fedloom.errors import ExperimentError, InterruptedRun, argument

    with collection_paused():
        from fedloom.engine.log_file import logged_to
        from fedloom.engine.worker import Worker

    owned = processes.ends_with_parent()
    # `fedloom run` has already verified the shards of its own workers.
    options = replace(options, verify=not owned, trust=access.options())
    settings = experiments.settings_of(experiments.WorkerSettings, options.settings, "the worker")
    if dry_run is not None:
        return disclosure(options, None if dry_run == "any" else dry_run, class_counts=settings.class_counts)
    refuse_options({"--json": as_json}, "is for --dry-run.")
    if aggregator is None:
        raise ExperimentError("Give --aggregator HOST:PORT, or --dry-run EXPERIMENT.", key="aggregator")
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    user = None if options.metrics is None else argument("metrics")
    part = None if owned else capability("member", user)  # `fedloom run` shows what its own workers do
    cockpit = None if part is None else part.Cockpit(name, options.metrics)
    serving = Worker(aggregator, name, options, cockpit)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if termination_requested.is_set():
        stop.set()
    if owned:
        act_at_eof(lambda: _leave(stop))
    with ExitStack() as stack:
        if settings.log is not None:
            stack.enter_context(logged_to(expanded(settings.log)))
        if cockpit is not None:
            stack.enter_context(cockpit.shown())
        over = serving.serve(stop)
    if not over and not owned:  # an evicted pod has not done its work, and another must
        raise InterruptedRun("stopped before the end of the run; another worker may take over")
    return None


def _leave(stop: threading.Event) -> None:
    """Stop serving, and end the process within seconds; for a worker whose parent has died."""
    stop.set()
    # A long training step may be in progress, and nobody waits for its result.
    timer = threading.Timer(3.0, os._exit, (0,))
    timer.daemon = True
    timer.start()


# --- dry run ----------------------------------------------------------------------------------------------------------

SUMMED = (
    "Secure aggregation: the aggregator receives the quantities marked `only in sums` as integers under random masks, "
    "and can read only their sum over three clients or more. It also receives public keys, signatures, encrypted "
    "shares of random secrets, and checksums (docs/secure-sums.md). Other clients of a sum learn this client's id and "
    "public key."
)
"""Sentences about answers that are only summed."""


def disclosure(options: WorkerOptions, experiment: str | None, *, class_counts: bool) -> CommandResult:
    """Return the data that a worker would send about its packed clients; send nothing."""
    from fedloom import experiment as experiments
    from fedloom.algorithms.base import available, find_algorithm
    from fedloom.data.own import OwnClients
    from fedloom.engine.disclosure import (
        announcements,
        answers,
        is_measured,
        measures,
        moment_tensors,
        of_experiment,
        parts_for_clients,
    )
    from fedloom.engine.member import check_allowed
    from fedloom.errors import ExperimentError
    from fedloom.evaluation.plan import EvaluationPlan

    if not (options.packed or options.observe):
        raise ExperimentError("--dry-run needs --data or --observe.", key="dry_run")
    clients = OwnClients.open(options.packed, options.observe)
    e = None if experiment is None else experiments.load_experiment(experiment)
    parts = None if e is None else parts_for_clients(e, clients)
    size = None if parts is None else parts.setup.model.layout.size * parts.setup.dtype.itemsize
    check_allowed(options, e, size, sends_class_counts=class_counts)
    if e is not None and parts is not None:
        trained, measured = of_experiment(e, parts)
        training = {e.algorithm.name: trained}
    else:
        classes = next(iter(clients.cards.values())).spec.classes
        training = {name: answers(find_algorithm(name)) for name in available()}
        measured = measures(2, EvaluationPlan.of_classes(classes))
    secure = e is not None and e.federation.secure_aggregation is not None
    moments = moment_tensors(only_summed=secure) if is_measured(e, clients) else []
    announced = announcements(clients, class_counts=class_counts)
    facts = {"announcements": announced, "moments": moments, "training": training, "evaluation": measured}
    privacy = None if e is None else e.federation.privacy
    return CommandResult(facts, lambda: _show_disclosure(facts, privacy, is_sized=e is not None))


def _show_disclosure(facts: Mapping[str, Any], privacy: TrainingPrivacy | None, *, is_sized: bool) -> None:
    import json

    typer.echo("The worker sends the aggregator its name, device and versions, and for each client")
    for announcement in facts["announcements"]:
        typer.echo(f"  {json.dumps(announcement)}")
    if facts["moments"]:
        _show("\nOnce, if normalization is measured, for training clients", facts["moments"])
    for name, tensors in facts["training"].items():
        _show(f"\n{name}: in training and personalization", tensors)
    title = "\nIn evaluations" if is_sized else "\nAll methods: in evaluations, with two predictors"
    _show(title, facts["evaluation"])
    if not is_sized:
        typer.echo("\nFor the sizes of models, and what secure aggregation hides, give --dry-run EXPERIMENT.")
    if any(one.only_summed for one in itertools.chain(*facts["training"].values(), facts["evaluation"])):
        typer.echo(f"\n{SUMMED}")
    if privacy is not None:
        typer.echo(f"\n{_noise(privacy)}")
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
    from fedloom.cli.tables import print_table

    headings = ["message", "quantity", "shape", "numbers"]
    rows = [
        [
            f"{one.message}.{one.field}",
            one.quantity,
            f"[{', '.join(map(str, one.shape))}]",
            "" if one.numbers is None else f"{one.numbers:,}",
        ]
        for one in tensors
    ]
    if any(one.only_summed for one in tensors):
        headings.append("known")
        for row, one in zip(rows, tensors, strict=True):
            row.append("only in sums" if one.only_summed else "individually")
    typer.echo(title if rows else f"{title}: nothing")
    if rows:
        print_table("", headings, rows, texts=(0, 1, 2, 4))
