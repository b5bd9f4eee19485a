"""``fedloom datasets``, ``fedloom data fetch`` and ``fedloom partition``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.api.progress import show_progress
from fedloom.cli.completion import completed_values
from fedloom.cli.options import Commands, ExperimentFile, Set
from fedloom.cli.pack import pack_command
from fedloom.cli.results import CommandResult
from fedloom.core.files import storing
from fedloom.core.words import pluralize

if TYPE_CHECKING:
    from fedloom.data.datasets import Dataset, RawDataset
    from fedloom.data.manifest import Manifest

data_command = Commands(help="Files of data sets, and clients' own data.")
data_command.command("pack")(pack_command)


@data_command.command("fetch")
def fetch_command(
    name: Annotated[
        str,
        typer.Argument(help="The data set, such as fashion-mnist.", autocompletion=completed_values("data.dataset")),
    ],
    copy_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Read the files from this folder and replace stored ones: the official ones, plain or .gz, or LEAF's.",
        ),
    ] = None,
) -> CommandResult:
    """Fetch a data set. It is verified and stored where experiments look for it.

    The folder is $FEDLOOM_DATA, by default ~/.cache/fedloom.
    """
    from fedloom.data import datasets

    source = datasets.find_dataset(name)
    with show_progress(bytes_counted=True) as report:
        folder = datasets.fetch_dataset(
            source,
            copy_from=copy_from,
            on_progress=lambda now: report(f"{name}: {now.doing}", now.done, now.total),
        )
        report(f"{name}: reading", 0, None)
        official = datasets.load_dataset(source)
    facts = {"name": name, "folder": folder, "train": len(official.train), "test": len(official.test)}
    return CommandResult(facts, f"{name} is in {folder}\n{description(source, official)}")


def description(source: Dataset, official: RawDataset) -> str:
    """Return a description of a data set in two lines: its examples, classes and owners, and its licence."""
    shape = " x ".join(map(str, source.spec.input_shape))
    owners = official.owners
    if owners is None:
        whose = "no per-user ids"
    elif len(owners.names) == 1:
        whose = f"one owner, {owners.names[0]}"
    else:
        among = "divided among" if owners.divided else "of"
        whose = f"{among} {len(owners.names):,} owners, {owners.names[0]} to {owners.names[-1]}"
    examples = f"{len(official.train):,} train and {len(official.test):,} test examples of {shape} {source.spec.kind}"
    classes = pluralize(source.spec.classes, "class", "classes")
    return f"{source.title}: {examples}, {classes}; {whose}\nlicence: {source.licence}"


def datasets_command() -> CommandResult:
    """List the data sets. Shows their size on this machine, if fetched, and their licences."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from fedloom.data import datasets
    from fedloom.data.folders import data_root

    home = data_root()
    sizes = {name: datasets.size_on_disk(source, home) for name, source in datasets.DATASETS.items()}
    facts = [
        {
            "name": name,
            **{key: getattr(source, key) for key in ("title", "licence", "synthetic")},
            **{key: getattr(source.spec, key) for key in ("kind", "input_shape", "classes")},
            "bytes": sizes[name],
            "folder": None if sizes[name] is None else source.folder(home),
        }
        for name, source in datasets.DATASETS.items()
    ]
    table = Table("name", "title", "size", "licence", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns[:3]:
        column.no_wrap = True
    for name, source in datasets.DATASETS.items():
        size = sizes[name]
        if size is not None:
            here = decimal(size)
        elif source.synthetic:
            here = "no files"
        else:
            here = "damaged" if source.folder(home).exists() else "not fetched"
        table.add_row(name, source.title, here, source.licence)

    def show() -> None:
        Console(highlight=False, markup=False).print(table)
        typer.echo(f"\nData sets are in {home / 'datasets'}; to fetch one: fedloom data fetch NAME")

    return CommandResult(facts, show)


def partition_command(
    experiment: ExperimentFile,
    set_: Set = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Copy the partition to this new folder too, or publish it at s3://BUCKET/PREFIX.", metavar="DIR|URL"
        ),
    ] = None,
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch", help="Fetch the data set first if it is not on this machine, nor its partition published."
        ),
    ] = False,
) -> CommandResult:
    """Create or repair an experiment's partition."""
    import shutil

    from fedloom import experiment as experiments
    from fedloom.core.urls import is_url
    from fedloom.errors import ExperimentError
    from fedloom.storage import open_store

    settings = experiments.load_experiment(experiment, set_ or ())
    from fedloom.data.federated import FederatedDataset  # imports torch, so only after the file is checked
    from fedloom.data.folders import published
    from fedloom.data.partition import partition_dataset
    from fedloom.data.remote import is_published, publish

    store = open_store(out) if out is not None and is_url(out) else None
    if store is not None:
        store.check()
    elif out is not None and Path(out).exists():
        raise ExperimentError(f"--out must be a new folder, and {out} exists.", key="out", found=out)
    data = settings.data
    if isinstance(data, experiments.OwnData):
        raise ExperimentError(
            f"{experiment} has data.own: its clients have their own data, so there is nothing to partition.",
            key="data.own",
            hint="pack a client's data: fedloom data pack SOURCE --out DIR --experiment EXPERIMENT",
        )
    chosen = data.partition_settings(settings.seed)
    if fetch and data.source is None:
        from fedloom.data import datasets

        if store is not None and (found := is_published(store, data.dataset, chosen)):
            return _clients_of(found, str(out), already=True)
        datasets.fetch_dataset(datasets.find_dataset(data.dataset), data.root)
    folder = partition_dataset(data.opened(), chosen, root=data.root, fix=True)
    manifest = FederatedDataset.open(folder).manifest
    if store is not None:
        publish(folder, store)
    elif out is not None:
        with storing(Path(out)):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
        with published(Path(out)) as staging:
            shutil.copytree(folder, staging, dirs_exist_ok=True)
    return _clients_of(manifest, out or str(folder), already=False)


def _clients_of(manifest: Manifest, where: str, *, already: bool) -> CommandResult:
    seen, unseen = len(manifest.roster), len(manifest.unseen)
    text = f"{seen} seen and {unseen} unseen clients{', already' if already else ''} in {where}"
    return CommandResult({"partition": where, "seen": seen, "unseen": unseen, "already": already}, text)
