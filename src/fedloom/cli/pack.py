"""``fedloom data pack``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.api.progress import show_progress
from fedloom.cli.options import Set


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
    set_: Set = None,
    read: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="How to read SOURCE, by a key of `data.source` (docs/experiment-keys.md), such as label=diagnosis, "
            "split=part, task=regression, outputs=3 or text.column=review; repeatable.",
        ),
    ] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="The data have no labels.")] = False,
    test_fraction: Annotated[float, typer.Option(help="Fraction of the examples for testing.", metavar="F")] = 0.2,
    validation_fraction: Annotated[
        float,
        typer.Option(help="Fraction of the remaining examples for validation.", metavar="F", show_default="1/6"),
    ] = 1 / 6,
    seed: Annotated[int, typer.Option(help="Seed of the random split.", min=0)] = 1,
) -> None:
    """Pack a client's own data. They are checked, split, and written to a folder for `fedloom worker --data`."""
    import json

    from fedloom import experiment as experiments
    from fedloom.core.words import first_of, pluralize
    from fedloom.data.local import LocalFiles
    from fedloom.data.pack import PackSettings
    from fedloom.data.pack import pack as pack_client
    from fedloom.errors import ExperimentError
    from fedloom.experiment.loading import settings_of

    needs = features = None
    files = settings_of(LocalFiles, (f"path={json.dumps(str(source))}", *(read or ())), "--read", "--read ")
    if experiment is not None:
        data = experiments.load_experiment(experiment, set_ or ()).data
        if not isinstance(data, experiments.OwnData):
            raise ExperimentError(
                f"--experiment must have data.own, the requirements on clients' data; {experiment} has none.",
                key="experiment",
            )
        needs, features = data.own.spec, data.own.features
        if files.outputs is not None:
            raise ExperimentError("outputs cannot be combined with --experiment, which states them.", key="outputs")
    elif set_:
        raise ExperimentError("--set needs --experiment.", key="set")
    request = files.request(needs=needs, features=features, labelled=not unlabelled, keys="--read ")
    with show_progress() as report:
        packed = pack_client(source, out, PackSettings(id_, request, test_fraction, validation_fraction, seed), report)
    card = packed.card
    shape = " x ".join(map(str, card.spec.input_shape))
    classes = f"{card.spec.classes} classes" if card.labelled else "no labels"
    if card.spec.targets is not None:
        classes = f"{card.spec.targets.task} of {pluralize(card.spec.targets.outputs, 'output')}"
    shape = shape or ", ".join(f"{name} {' x '.join(map(str, spec.shape))}" for name, spec in card.spec.inputs.items())
    how = ", ".join(f"{key} {value:g}" for key, value in card.division.items() if key != "given")
    lines = [
        f"{card.id}: {card.train:,} train, {card.validation:,} validation and {card.test:,} test examples of {shape} "
        f"{card.spec.kind}, {classes}",
        f"split: {how or 'as in the source'}",
        *([] if card.features is None else [f"features: {first_of(card.features)}"]),
        *([] if card.spec.tokenizer is None else [f"tokenizer: {card.spec.tokenizer}"]),
        *packed.notes,
        f"in {out}",
    ]
    typer.echo("\n".join(lines))
