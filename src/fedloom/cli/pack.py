"""``fedloom data pack``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.api.progress import show_progress
from fedloom.cli.results import CommandResult


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
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="How to read SOURCE, by a key of `data.source` (docs/keys/data.md), such as label=diagnosis, "
            "split=part, task=regression, outputs=3 or text.column=review; and labelled (true; or false), "
            "test_fraction (of the examples; 0.2), validation_fraction (of the rest; 1/6), seed (of the random split; "
            "1); repeatable.",
        ),
    ] = None,
) -> CommandResult:
    """Pack a client's own data. They are checked, split, and written to a folder for `fedloom worker --data`."""
    import json

    from pydantic import Field

    from fedloom import experiment as experiments
    from fedloom.core.words import first_of, pluralize
    from fedloom.data.local import LocalFiles
    from fedloom.data.pack import PackSettings
    from fedloom.data.pack import pack as pack_client
    from fedloom.errors import ExperimentError
    from fedloom.experiment.loading import settings_of

    class SourceFiles(LocalFiles):
        """Reading and splitting of a client's files."""

        labelled: bool = True
        test_fraction: float = 0.2
        validation_fraction: float = 1 / 6
        seed: int = Field(default=1, ge=0)

    needs = features = None
    files = settings_of(SourceFiles, (f"path={json.dumps(str(source))}", *(set_ or ())), "the source")
    if experiment is not None:
        data = experiments.load_experiment(experiment).data
        if not isinstance(data, experiments.OwnData):
            raise ExperimentError(
                f"--experiment must have data.own, the requirements on clients' data; {experiment} has none.",
                key="experiment",
            )
        needs, features = data.own.spec, data.own.features
        if files.outputs is not None:
            raise ExperimentError("outputs cannot be combined with --experiment, which states them.", key="outputs")
    request = files.request(needs=needs, features=features, keys="--set ")
    settings = PackSettings(id_, request, files.test_fraction, files.validation_fraction, files.seed)
    with show_progress() as report:
        packed = pack_client(source, out, settings, report)
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
    counts = {"train": card.train, "validation": card.validation, "test": card.test}
    facts = {"id": card.id, "folder": out, **counts, "division": card.division, "notes": packed.notes}
    return CommandResult(facts, "\n".join(lines))
