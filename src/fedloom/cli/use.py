"""What is done with a finished run: ``fedloom evaluate``, ``personalize``, ``report`` and ``compare``."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.words import counted

if TYPE_CHECKING:
    from fedloom.data.federated import FederatedDataset
    from fedloom.evaluation.summary import Evaluation
    from fedloom.run.assemble import Parts

Run = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]
Which = Annotated[str, typer.Option("--checkpoint", help="last, best or a round.", metavar="last|best|N")]
Other = Annotated[
    str | None,
    typer.Option("--partition", metavar="DIR|URL", help="Clients of another partition of the same kind of data."),
]


def evaluate(
    run: Run,
    checkpoint: Which = "last",
    partition: Other = None,
    out: Annotated[Path | None, typer.Option(help="Write the statistics as JSON to this file.")] = None,
) -> None:
    """Measure a trained model again on every client, or on the clients of another partition."""
    from rich.console import Console

    from fedloom.cli.watch import results

    statistics = measured(run, checkpoint, partition).statistics
    Console().print(results(statistics))  # first: what was measured is not lost with a file that cannot be written
    if out is not None:
        from fedloom.errors import StorageError
        from fedloom.storage.folder import write_atomically

        try:
            write_atomically(out, (json.dumps(statistics, indent=2) + "\n").encode())
        except StorageError as error:
            raise StorageError(str(error.args[0]), hint="choose another file with --out") from error


@dataclass(frozen=True)
class Measured:
    """What an evaluation of a checkpoint found, and of what."""

    statistics: dict[str, Any]
    evaluation: Evaluation
    parts: Parts


def measured(run: Path, checkpoint: str = "last", partition: str | Path | None = None) -> Measured:
    """Measure a checkpoint of a run on the run's clients, or on those of another partition, who are all unseen.

    Raises
    ------
    ExperimentError
        If ``checkpoint`` is none of last, best and a number.
    DataError
        If the folder is not that of a run, has no such checkpoint, or the partition is of another kind of data,
        incomplete or damaged.
    QuorumError
        If clients could not be measured.
    """
    import torch

    from fedloom.errors import QuorumError
    from fedloom.evaluation.summary import groups

    parts, loop, dataset = _restored(run, checkpoint, partition)
    evaluation = loop.evaluate()
    if not evaluation.present.all():  # statistics of the others would be taken for those of all
        missing = [evaluation.clients[int(i)] for i in (~evaluation.present).nonzero()]
        named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise QuorumError(
            f"{len(missing)} of {counted(len(evaluation.clients), 'client')} could not be measured: {named}"
        )
    if not parts.task.same_clients:  # whatever their partition calls them, this training never saw them
        evaluation = dataclasses.replace(evaluation, seen=torch.zeros_like(evaluation.seen))
    statistics = {
        "name": parts.experiment.name,
        "algorithm": parts.algorithm.name,
        "seed": parts.experiment.seed,
        "round": loop.round,
        "partition": dataset.manifest.fingerprint,
        **groups(evaluation, label_mask=parts.experiment.evaluation.label_mask),
        **loop.extra(evaluation),
    }
    return Measured(statistics, evaluation, parts)


def personalize(
    run: Run,
    out: Annotated[Path, typer.Option(help="New folder for one safetensors file per client.", metavar="DIR")],
    checkpoint: Which = "last",
    partition: Other = None,
    clients: Annotated[str | None, typer.Option(help="Ids, separated by commas; by default all.")] = None,
) -> None:
    """Give clients, seen or never seen, their own models, and save them."""
    import safetensors.torch

    from fedloom.algorithms.base import Group, Predictors
    from fedloom.cli.worker import chosen
    from fedloom.errors import ExperimentError
    from fedloom.evaluation.measure import nothing_measured
    from fedloom.messages import Message
    from fedloom.run import assemble
    from fedloom.storage.folder import write_atomically

    if out.exists():
        raise ExperimentError(f"--out: found {out}, which exists; allowed: a new folder")
    saved: list[str] = []
    parts, loop, dataset = _restored(run, checkpoint, partition)
    wanted = chosen([entry.id for entry in dataset.manifest.clients], clients, None)
    for client in wanted:
        dataset.manifest.entry(client)
    out.mkdir(parents=True)

    def save(predictors: Predictors, group: Group) -> Message:
        for named, client in zip(predictors, group.clients, strict=True):
            tensors = {f"{name}.{key}": t for name, p in named.items() for key, t in p.tensors().items()}
            layout = [[name, list(shape)] for name, shape in parts.task.model.layout.entries]
            about = json.dumps({"client": client.id, "round": loop.round, "layout": layout}, sort_keys=True)
            contiguous = {key: t.contiguous().clone() for key, t in tensors.items()}
            content = safetensors.torch.save(contiguous, metadata={"fedloom": about})
            write_atomically(out / f"{client.id}.safetensors", content)
            saved.append(client.id)
        return nothing_measured(len(predictors), len(loop.predictors), dataset.manifest.classes)

    loop.carrier = assemble.in_process(parts, dataset, loop.folder, save)
    lost = loop.personalize(wanted)
    typer.echo(f"{counted(len(saved), 'model')} in {out}")
    for client, reason in lost.items():
        typer.echo(f"{client}: no model: {reason}", err=True)
    if lost:
        from fedloom.errors import QuorumError

        raise QuorumError(f"{len(lost)} of {counted(len(wanted), 'client')} got no model")


def report(run: Run) -> None:
    """Write report.html and figures/ anew from a run's files."""
    from fedloom.reporting.report import write_report

    typer.echo(f"report: {write_report(run)}")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, or folders that hold some.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write compare.html, .csv, .tex and figures to this folder.", metavar="DIR"),
    ] = None,
) -> None:
    """Show side by side what each client would get; runs that differ in the seed alone are merged."""
    show_comparison(runs, out)
    if out is not None:
        typer.echo(f"comparison: {out / 'compare.html'}")


def show_comparison(runs: Sequence[Path], out: Path | None) -> None:
    """Show what finished runs found, and write it to a folder that is new or an earlier comparison's."""
    from rich.console import Console
    from rich.text import Text

    from fedloom.cli.watch import narrow
    from fedloom.reporting.compare import compare
    from fedloom.reporting.compare_report import check_out, write_comparison
    from fedloom.reporting.compare_tables import as_text, choice_headings, choices_as_text, headings, text_title

    if out is not None:
        check_out(out)
    comparison = compare(runs)
    console = Console()
    for notice in comparison.notices:
        typer.echo(notice, err=True)
    several = len(comparison.blocks) > 1
    styles = {"best": "bold", "tied": "underline"}
    for title, lines in as_text(comparison).items():
        about = text_title(comparison)
        table = narrow(f"{about}\n{title}" if several else about, headings(comparison))
        for cells in lines:
            table.add_row(*(Text(cell.text, styles.get(cell.mark, "")) for cell in cells))
        console.print(table)
    if console.is_terminal and len(comparison.rows) > 1:
        typer.echo("bold: best; underlined: not told from it by a paired test over clients")
    if comparison.chosen:
        table = narrow(f"\nBest on validation ({comparison.scale.words})", choice_headings(comparison))
        for line in choices_as_text(comparison):
            table.add_row(*map(Text, line))
        console.print(table)
    if out is not None:
        write_comparison(comparison, out)


def _restored(run: Path, which: str, partition: str | Path | None) -> tuple[Parts, Any, FederatedDataset]:
    """A run's server at a checkpoint, with clients in this process."""
    from fedloom import experiment as experiments
    from fedloom.cli.watch import Watch
    from fedloom.data.federated import FederatedDataset, Manifest
    from fedloom.errors import DataError, ExperimentError
    from fedloom.federation.checkpoint import check_fits
    from fedloom.federation.folder import RunFolder
    from fedloom.federation.journal import Journal
    from fedloom.run import assemble
    from fedloom.storage import is_url

    if which not in ("last", "best") and not which.isdecimal():
        raise ExperimentError(f"--checkpoint: found {which!r}, allowed: last, best or a round")
    folder = RunFolder(run)
    text = folder.read("partition.json")
    if text is None or folder.read("experiment.yaml") is None:
        raise DataError(
            f"{run}: not a run's folder (no experiment.yaml or partition.json)", hint="fedloom run EXPERIMENT"
        )
    e = experiments.load(run / "experiment.yaml")
    trained_on = Manifest.from_json(text, where=str(run / "partition.json"))
    dataset = assemble.make_partition(e) if partition is None else FederatedDataset.open(partition)
    for what in ("dataset", "classes", "input_shape"):
        found, needed = getattr(dataset.manifest, what), getattr(trained_on, what)
        if found != needed:
            raise DataError(f"{dataset.folder}: {what} is {found}, the run was trained with {needed}")
    if partition is not None and not is_url(partition):  # a store's shards are checked as they come
        dataset.verify()
    # The models have learned inputs as the training partition normalizes them.
    manifest = dataclasses.replace(dataset.manifest, normalization=trained_on.normalization)
    dataset = FederatedDataset(dataset.folder, manifest, dataset.source)
    assemble.use_device("cpu", e.runtime.threads)
    parts = assemble.make_parts(e, dataset.manifest, trained_on)
    loop = assemble.loop(
        parts,
        assemble.in_process(parts, dataset, folder),
        folder,
        Watch(0),
        threading.Event(),
        keep_descriptors=False,
    )
    checkpoint = loop.checkpoints.load(int(which) if which.isdecimal() else which)
    check_fits(checkpoint, loop.server.state(), parts.algorithm.name, parts.algorithm.version)
    loop.server.load(checkpoint.state)
    loop.round = checkpoint.round
    if parts.task.same_clients:  # a client of another partition is another client, whatever its name
        loop.journal = Journal.read(folder)
    return parts, loop, dataset
