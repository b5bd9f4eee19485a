"""``fedloom data fetch`` and ``fedloom partition``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.progress import progress

if TYPE_CHECKING:
    from fedloom.data.sources import Official, Source


def fetch(
    name: Annotated[str, typer.Argument(help="The data set, such as fashion-mnist.")],
    root: Annotated[
        Path | None, typer.Option(help="Folder for data; by default $FEDLOOM_DATA, else ~/.cache/fedloom.")
    ] = None,
    copy_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Take the files from here, in place of any stored before: official ones, plain or .gz, or LEAF's.",
        ),
    ] = None,
) -> None:
    """Fetch a data set, check it, and store it where experiments find it."""
    from fedloom.data import sources

    source = sources.find(name)
    with progress(bytes_counted=True) as tell:
        folder = sources.fetch(
            source,
            root,
            copy_from=copy_from,
            on_progress=lambda now: tell(f"{name}: {now.doing}", now.done, now.total),
        )
        tell(f"{name}: reading it", 0, None)
        official = sources.load(source, root)
    typer.echo(f"{name} is in {folder}")
    typer.echo(description(source, official))


def description(source: Source, official: Official) -> str:
    """Return what a data set is, in two lines: its examples, classes and owners; its licence."""
    shape = " x ".join(map(str, source.input_shape))
    owners = official.owners
    if owners is None:
        whose = "nobody is known to own them"
    else:
        among = "divided among" if owners.divided else "of"
        whose = f"{among} {len(owners.names):,} owners, {owners.names[0]} to {owners.names[-1]}"
    examples = f"{len(official.train):,} train and {len(official.test):,} test examples of {shape} {source.kind}"
    return f"{source.title}: {examples}, {source.classes} classes; {whose}\nlicence: {source.licence}"


def partition(
    experiment: Annotated[str, typer.Argument(help="The experiment file, or its URL.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Copy the partition to this new folder too, or publish it at s3://BUCKET/PREFIX.", metavar="DIR|URL"
        ),
    ] = None,
) -> None:
    """Deal an experiment's data out to its clients, and mend a damaged partition."""
    import shutil

    from fedloom.cli import reading
    from fedloom.data.federated import FederatedDataset
    from fedloom.data.folders import published
    from fedloom.data.partition import partition as deal
    from fedloom.data.remote import publish
    from fedloom.errors import ExperimentError
    from fedloom.storage import is_url, open_store

    settings = reading.experiment(experiment, set_ or ())
    store = open_store(out) if out is not None and is_url(out) else None
    if store is not None:
        store.check()
    elif out is not None and Path(out).exists():
        raise ExperimentError(f"--out: found {out}, which exists; allowed: a new folder")
    data = settings.data
    folder = deal(
        data.dataset,
        data.partition,
        seed=settings.seed,
        unseen_fraction=data.unseen_fraction,
        validation_fraction=data.validation_fraction,
        root=data.root,
        mend=True,
    )
    manifest = FederatedDataset.open(folder).manifest
    where = out or str(folder)
    if store is not None:
        publish(folder, store)
    elif out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with published(Path(out)) as staging:
            shutil.copytree(folder, staging, dirs_exist_ok=True)
    typer.echo(f"{len(manifest.roster)} seen and {len(manifest.unseen)} unseen clients in {where}")
