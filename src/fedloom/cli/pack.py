"""``fedloom data pack``: package one client's own data as a folder that a worker serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from fedloom.api.progress import show_progress
from fedloom.cli.options import Set

if TYPE_CHECKING:
    from fedloom.data.pack.examples import TextColumn
    from fedloom.data.requirements import Own
    from fedloom.tasks.names import TaskName


def pack_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of images with one folder per class, a folder of .parquet files, or a .csv, .parquet, .npz, "
            ".safetensors or .txt file."
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
    label: Annotated[str, typer.Option(help="For a table: the column with the labels.", metavar="COLUMN")] = "label",
    split: Annotated[
        str | None,
        typer.Option(help="For a table: the column with train, validation or test.", metavar="COLUMN"),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="For a table: the columns with the targets, separated by commas, in place of --label.",
            metavar="COLUMN,...",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="The task of the targets: classification, multilabel, regression, segmentation or next_token. By "
            "default as the experiment requires, or as the data suggest.",
            metavar="NAME",
        ),
    ] = None,
    outputs: Annotated[
        int | None,
        typer.Option(
            help="Minimum number of classes of a pixel, or of tokens, for data that may lack some. By default as "
            "many as the data have; an experiment states them.",
            min=1,
        ),
    ] = None,
    integers: Annotated[
        str | None,
        typer.Option(
            help="For a table: the columns of integers that stay as they are, separated by commas, or `all`.",
            metavar="COLUMN,...",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="For a table: the column of texts, which become tokens, the only inputs.", metavar="COLUMN"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="With --text: the folder of a tokenizer of transformers (`save_pretrained`).", metavar="DIR"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="With --text: tokens of each example; longer texts are cut, and shorter ones padded. By default as "
            "the experiment requires.",
            min=1,
        ),
    ] = None,
    padding: Annotated[
        Literal["left", "right"] | None,
        typer.Option(
            help="With --text: the side on which shorter texts are padded. By default the tokenizer's own.",
            metavar="left|right",
        ),
    ] = None,
    truncation: Annotated[
        Literal["left", "right", "refuse"] | None,
        typer.Option(
            help="With --text: the side on which longer texts are cut; `refuse`: they are errors. By default the "
            "tokenizer's own side.",
            metavar="left|right|refuse",
        ),
    ] = None,
    mask: Annotated[
        bool, typer.Option("--mask/--no-mask", help="With --text: also give the input `attention_mask`.")
    ] = True,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="The data have no labels.")] = False,
    resize: Annotated[bool, typer.Option("--resize", help="Resize images of another size.")] = False,
    test_fraction: Annotated[float, typer.Option(help="Fraction of the examples for testing.", metavar="F")] = 0.2,
    validation_fraction: Annotated[
        float,
        typer.Option(help="Fraction of the remaining examples for validation.", metavar="F", show_default="1/6"),
    ] = 1 / 6,
    seed: Annotated[int, typer.Option(help="Seed of the random split.", min=0)] = 1,
) -> None:
    """Pack a client's own data. They are checked, split, and written to a folder for `fedloom worker --data`."""
    from fedloom.core.words import pluralize
    from fedloom.data.pack import PackSettings
    from fedloom.data.pack import pack as pack_client
    from fedloom.data.pack.examples import Request, listed
    from fedloom.errors import ExperimentError

    own = None
    if experiment is not None:
        from fedloom import experiment as experiments
        from fedloom.experiment import OwnData

        data = experiments.load_experiment(experiment, set_ or ()).data
        if not isinstance(data, OwnData):
            raise ExperimentError(
                f"--experiment must have data.own, the requirements on clients' data; {experiment} has none.",
                key="experiment",
            )
        own = data.own
        if outputs is not None:
            raise ExperimentError("--outputs cannot be combined with --experiment, which states them.", key="outputs")
    elif set_:
        raise ExperimentError("--set needs --experiment.", key="set")
    request = Request(
        own,
        not unlabelled,
        label,
        split,
        resize,
        task=_task(task),
        outputs=outputs,
        targets=_columns(targets),
        integers=integers == "all" or _columns(integers),
        text=_text(own, text, tokenizer, length, padding=padding, truncation=truncation, mask=mask),
    )
    with show_progress() as report:
        packed = pack_client(source, out, PackSettings(id_, request, test_fraction, validation_fraction, seed), report)
    card = packed.card
    shape = " x ".join(map(str, card.input_shape))
    classes = f"{len(card.classes)} classes" if card.labelled else "no labels"
    if card.targets is not None:
        classes = f"{card.targets.task} of {pluralize(card.targets.outputs, 'output')}"
    shape = shape or ", ".join(f"{name} {' x '.join(map(str, spec.shape))}" for name, spec in card.specs.items())
    typer.echo(
        f"{card.id}: {card.train:,} train, {card.validation:,} validation and {card.test:,} test examples of {shape} "
        f"{card.kind}, {classes}"
    )
    how = ", ".join(f"{key} {value:g}" for key, value in card.division.items() if key != "given")
    typer.echo(f"split: {how or 'as in the source'}")
    if card.features is not None:
        typer.echo(f"features: {listed(card.features)}")
    if card.tokenizer_digest is not None:
        typer.echo(f"tokenizer: {card.tokenizer_digest}")
    for note in packed.notes:
        typer.echo(note)
    typer.echo(f"in {out}")


def _text(
    own: Own | None, column: str | None, tokenizer: str | None, length: int | None, **options: Any
) -> TextColumn | None:
    """Return the column of texts that the options describe, if they describe one."""
    from fedloom.data.pack.examples import TextColumn
    from fedloom.errors import ExperimentError

    given = {"tokenizer": tokenizer, "length": length, **options}
    if column is None:
        unused = [f"--{key}" for key, value in given.items() if value is not None and key != "mask"]
        if unused or not options["mask"]:
            raise ExperimentError(f"{(unused or ['--no-mask'])[0]} needs --text.", key="text")
        return None
    if length is None and own is not None:
        length = next((spec.shape[0] for spec in own.specs.values() if spec.shape), None)
    for key, value in (("tokenizer", tokenizer), ("length", length)):
        if value is None:
            raise ExperimentError(f"--text needs --{key}.", key=key)
    return TextColumn.model_validate({**given, "column": column, "length": length})


def _columns(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _task(name: str | None) -> TaskName | None:
    from fedloom.errors import ExperimentError
    from fedloom.tasks.names import TaskName

    for known in get_args(TaskName):
        if name == known:
            task: TaskName = known
            return task
    if name is None:
        return None
    allowed = get_args(TaskName)
    raise ExperimentError(f"--task must be one of {', '.join(allowed)} (got {name!r}).", key="task", allowed=allowed)
