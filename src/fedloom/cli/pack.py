"""``fedloom data pack``: package one client's own data as a folder that a worker serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.api.progress import show_progress


def pack_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of images with one folder per class, or a .csv, .parquet, .npz, .safetensors or .txt file."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the client.", metavar="DIR")],
    id_: Annotated[str | None, typer.Option("--id", help="The client's id; by default the name of SOURCE.")] = None,
    experiment: Annotated[
        str | None,
        typer.Option(
            help="The experiment file; its `data.own` states the requirements on a client's data.", metavar="FILE"
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable.")
    ] = None,
    label: Annotated[str, typer.Option(help="For a table: the column with the labels.", metavar="COLUMN")] = "label",
    split: Annotated[
        str | None,
        typer.Option(help="For a table: the column with train, validation or test.", metavar="COLUMN"),
    ] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="The data have no labels.")] = False,
    resize: Annotated[bool, typer.Option("--resize", help="Resize images of another size.")] = False,
    test_fraction: Annotated[float, typer.Option(help="Fraction of the examples for testing.", metavar="F")] = 0.2,
    validation_fraction: Annotated[
        float, typer.Option(help="Fraction of the remaining examples for validation.", metavar="F")
    ] = 1 / 6,
    seed: Annotated[int, typer.Option(help="Seed of the random split.", min=0)] = 1,
) -> None:
    """Pack a client's own data. They are checked, split, and written to a folder for `fedloom worker --data`."""
    from fedloom.data.pack import PackSettings
    from fedloom.data.pack import pack as pack_client
    from fedloom.data.pack.examples import Request, listed
    from fedloom.errors import ExperimentError

    own = None
    if experiment is not None:
        from fedloom import experiment as experiments
        from fedloom.experiment import OwnData

        data = experiments.load(experiment, set_ or ()).data
        if not isinstance(data, OwnData):
            raise ExperimentError(
                f"--experiment must have data.own, the requirements on clients' data; {experiment} has none.",
                key="experiment",
            )
        own = data.own
    elif set_:
        raise ExperimentError("--set needs --experiment.", key="set")
    request = Request(own, not unlabelled, label, split, resize)
    with show_progress() as tell:
        packed = pack_client(source, out, PackSettings(id_, request, test_fraction, validation_fraction, seed), tell)
    card = packed.card
    shape = " x ".join(map(str, card.input_shape))
    classes = f"{len(card.classes)} classes" if card.labelled else "no labels"
    typer.echo(
        f"{card.id}: {card.train:,} train, {card.validation:,} validation and {card.test:,} test examples of {shape} "
        f"{card.kind}, {classes}"
    )
    how = ", ".join(f"{key} {value:g}" for key, value in card.division.items() if key != "given")
    typer.echo(f"split: {how or 'as in the source'}")
    if card.features is not None:
        typer.echo(f"features: {listed(card.features)}")
    for note in packed.notes:
        typer.echo(note)
    typer.echo(f"in {out}")
