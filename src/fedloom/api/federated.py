"""Data in memory (arrays by client, a torchvision data set, a DataFrame) as the data of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api.frames import pandas
from fedloom.core.home import expanded
from fedloom.core.words import composed, named_twice
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch.utils.data import Dataset

    from fedloom.data.federated import FederatedDataset
    from fedloom.data.pack.examples import Request, TextColumn

NATURAL: Mapping[str, Any] = {"scheme": "natural"}
"""Partition with one client per owner."""


class Federated:
    """Clients' data for ``fedloom.run(..., data=...)``, stored in the data root under a hash of the content.

    A run on it can be resumed, loaded and compared like any other, in other processes too. Equal arrays are the same
    data set.

    Parameters
    ----------
    section
        The ``data`` section of an experiment.

    Attributes
    ----------
    section
        The section as given.

    Raises
    ------
    ExperimentError
        If it is not a mapping.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        if not isinstance(section, Mapping):
            raise ExperimentError(
                f"section must be the data section of an experiment as a mapping (got {section!r:.80}).",
                hint="for data in memory: Federated.from_arrays, from_torchvision or from_frame",
                key="section",
            )
        self.section = dict(section)
        if "augment" in self.section:
            from fedloom.data.augment import describe_transforms

            self.section["augment"] = describe_transforms(self.section["augment"])

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, tuple[Any, Any] | Mapping[str, Any] | Dataset[Any]],
        *,
        classes: Sequence[str] | None = None,
        task: str | None = None,
        outputs: int | None = None,
        channel_axis: str = "first",
        root: str | Path | None = None,
        **settings: Any,
    ) -> Federated:
        """Create a client for each entry.

        Parameters
        ----------
        clients
            By name, ``(x, y)`` or ``{"train_x": ..., "train_y": ..., "test_x": ..., "test_y": ...}``: numpy arrays,
            torch tensors or lists; or a ``torch.utils.data.Dataset`` of pairs ``(x, y)``. ``x`` holds numbers
            ``[n, ...]``, or pixels from 0 to 255 as uint8, ``[n, height, width]`` or ``[n, channels, height, width]``;
            integers from 0 that are not pixels stay integers. For several inputs it is a dict of them by name. ``y``
            holds what the task predicts: classes ``[n]``, integers or names, whose distinct values are the classes (if
            ``classes`` is given, an integer is an index into it); numbers ``[n]`` or ``[n, k]``, or a field of them
            ``[n, ...]``; 0 or 1 for each label, ``[n, K]``; masks ``[n, height, width]``, or of volumes
            ``[n, depth, height, width]``; or the next tokens, or labels of tokens, of the shape of ``x``.
        classes
            Names of the classes, in the order of the labels; None: the values that occur. For other tasks: names of the
            labels, numbers, or classes of a pixel.
        task
            ``classification``, ``multilabel``, ``regression``, ``segmentation`` or ``next_token``; None: inferred from
            the arrays (docs/data.md), and reported in the log ``fedloom.data``.
        outputs
            Minimum number of classes of a pixel, or of tokens, where the data may lack some.
        channel_axis
            Axis of an input along which features are standardized: ``first``, or ``last`` for ``[time, channels]``.
        root
            Folder to store the data in; None: ``$FEDLOOM_DATA``, else ``~/.cache/fedloom``.
        settings
            Further keys of ``data``, such as ``held_out_fraction=0.2``; ``partition={"scheme": "natural", ...}``;
            ``augment``, also as transforms of ``torchvision.transforms.v2``.

        Raises
        ------
        DataError
            If arrays differ in length, shape or kind, a label is unknown, or a number is not finite; the message names
            the client, the array, and what it must be.
        """
        if not isinstance(clients, Mapping) or not clients:
            description = "empty" if not clients else f"a {type(clients).__name__}"
            raise DataError(f"clients is {description}; give a dict of (x, y) by client.", key="clients")
        parts = [_named_arrays(name, arrays) for name, arrays in clients.items()]
        if (twice := named_twice([name for name, _ in parts])) is not None:
            raise DataError(f"clients has the name {twice!r} twice; give each client a unique name.", key="clients")
        request = _request(task=task, outputs=outputs, channel_axis=channel_axis)
        return cls._from_parts(parts, classes, root, {"partition": NATURAL, **settings}, request)

    @classmethod
    def from_torchvision(
        cls,
        dataset: Any,
        scheme: Mapping[str, Any],
        *,
        test: Any = None,
        classes: Sequence[str] | None = None,
        root: str | Path | None = None,
        **settings: Any,
    ) -> Federated:
        """Partition a torchvision data set among clients.

        Parameters
        ----------
        dataset
            Examples as ``(image, label)``, without a transform or with ``ToTensor`` only. Images are Pillow images
            with 8 bits per channel, tensors ``[channels, height, width]`` or arrays ``[height, width, channels]``.
            Labels are integers from 0, or class names. Palettes become RGB, and booleans 0 and 255,
            with a warning in the log ``fedloom.data``.
        scheme
            Partition of the examples, as ``data.partition`` of an experiment:
            ``{"scheme": "dirichlet", "clients": 20, "alpha": 0.1}``.
        test
            Another data set, for testing; None: a fifth of the examples.
        classes, root, settings
            As in :meth:`from_arrays`; without ``classes``, the data set's own.

        Raises
        ------
        DataError
            If an example is not an image and a label, a pixel or label cannot be stored exactly, images differ in size,
            or the number of examples is not ``len(dataset)``.
        ExperimentError
            If the scheme is not a mapping. Its content is checked on use.
        """
        from fedloom.data.local import log_notes
        from fedloom.data.pack.items import read_items

        partition = _partition(scheme)
        if classes is None:
            classes = getattr(dataset, "classes", None)
        arrays: dict[str, Any] = {}
        notes_of: list[tuple[str, Sequence[str]]] = []
        columns = (
            {"": ("dataset", dataset)} if test is None else {"train_": ("dataset", dataset), "test_": ("test", test)}
        )
        for prefix, (what, one) in columns.items():
            arrays[f"{prefix}x"], arrays[f"{prefix}y"], notes = read_items(one, what)
            notes_of.append((what, notes))
        federated = cls._from_parts([(None, arrays)], classes, root, {"partition": partition, **settings})
        for what, lines in notes_of:
            log_notes([f"{what} ({Path(federated.section['source']['path']).name}): {note}" for note in lines])
        return federated

    @classmethod
    def from_frame(
        cls,
        frame: DataFrame,
        *,
        label: str | int | Sequence[str],
        client: str | int | None = None,
        task: str | None = None,
        integers: bool | Sequence[str] = False,
        text: Mapping[str, Any] | None = None,
        scheme: Mapping[str, Any] | None = None,
        root: str | Path | None = None,
        **settings: Any,
    ) -> Federated:
        """Use the rows of a DataFrame as examples; all columns except those named are features.

        Parameters
        ----------
        label
            Column with the classes, by name or number; or with numbers, for regression. A list of columns: several
            numbers, or 0 and 1 for each of several labels.
        client
            Column with the owner of each row. Every owner is a client, unless a scheme partitions the rows.
        task
            As in :meth:`from_arrays`. A column of floats with fractions is for regression.
        integers
            True if all columns of inputs are integers that stay as they are, such as category codes; or the columns
            that are: the inputs are then ``features`` and ``integers``.
        text
            Column of texts whose tokens are the only inputs: ``{"column": "review", "tokenizer": FOLDER, "length":
            128}``, and the other keys of ``data.source.text``.
        scheme
            As in :meth:`from_torchvision`; required without ``client``.
        root, settings
            As in :meth:`from_arrays`.

        Raises
        ------
        DataError
            If a column is missing, duplicated or not numeric, a value is missing, or labels are neither integers nor
            names; the message names the column and the row.
        """
        from fedloom.data.local import of_frame

        if not isinstance(frame, pandas("from_frame").DataFrame):
            raise DataError(f"frame must be a pandas DataFrame (got a {type(frame).__name__})")
        if client is None and scheme is None:
            raise ExperimentError("from_frame needs client or scheme, or both")
        partition = _partition(NATURAL if scheme is None else scheme)
        several = () if isinstance(label, str | int) else tuple(map(str, label))
        request = _request(
            task=task,
            label=str(label),
            targets=several,
            client=None if client is None else str(client),
            integers=integers if isinstance(integers, bool) else tuple(map(str, integers)),
            text=None if text is None else _text(text),
        )
        path = of_frame(frame, request, root)
        return cls._from_path(path, root, {"partition": partition, **settings})

    @classmethod
    def _from_parts(
        cls,
        parts: Sequence[tuple[str | None, Mapping[str, Any]]],
        classes: Sequence[str] | None,
        root: str | Path | None,
        settings: Mapping[str, Any],
        request: Request | None = None,
    ) -> Federated:
        from fedloom.data.local import of_arrays

        return cls._from_path(of_arrays(parts, classes, root, request), root, settings)

    @classmethod
    def _from_path(cls, path: Path, root: str | Path | None, settings: Mapping[str, Any]) -> Federated:
        home = {} if root is None else {"root": str(expanded(root).absolute())}
        return cls({"dataset": "arrays", "source": {"path": str(path.absolute())}, **home, **settings})

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """Return the ``data`` section, like the sections of an experiment."""
        return self.section

    def open(self, seed: int = 1) -> FederatedDataset:
        """Return the partition of an experiment with this seed: its clients and their examples.

        Raises
        ------
        ExperimentError
            If a key is unknown, or the data cannot satisfy the scheme.
        """
        from pydantic import ValidationError

        from fedloom.data.local import log_notes
        from fedloom.engine.run_data import make_data
        from fedloom.experiment.loading import plain_value
        from fedloom.experiment.sections import Data
        from fedloom.experiment.validation_errors import explain, listing

        section = plain_value(self.section, "data")
        try:
            data = Data.model_validate(section)
        except ValidationError as error:
            errors = explain(error, Data.model_json_schema(), section)
            raise ExperimentError(listing("data", errors, {})) from None
        log_notes(data.opened().notes)
        return make_data(data, seed)

    def __repr__(self) -> str:
        return f"Federated({self.section!r})"


def _named_arrays(name: Any, given: Any) -> tuple[str, dict[str, Any]]:
    from torch.utils.data import Dataset

    from fedloom.data.local import log_notes
    from fedloom.data.pack.items import STACKED, read_dataset
    from fedloom.data.values import as_array

    if not isinstance(name, str) or not name.strip():
        raise DataError(f"Names of clients must be strings (got {name!r}).", key="clients")
    if isinstance(given, Dataset):
        *given, notes = read_dataset(given, f"client {name}")
        log_notes([f"client {name}: {note}" for note in notes])
    if not isinstance(given, Mapping):
        examples = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
        if len(examples) != 2 or not all(map(_holds_arrays, examples)):
            suffix = f" of {len(examples)} {type(examples[0]).__name__}" if examples else ""
            message = (
                f"client {name} must be (x, y), a dict, or a Dataset of torch (got a {type(given).__name__}{suffix})."
            )
            raise DataError(message, hint=STACKED, key="clients")
        given = dict(zip("xy", given, strict=True))
    arrays: dict[str, Any] = {}
    for key, value in given.items():
        place = f"client {name}: {key}"
        if isinstance(value, Mapping):
            arrays[key] = {_input_name(each, place): as_array(x, f"{place}[{each!r}]") for each, x in value.items()}
        else:
            arrays[key] = as_array(value, place)
    return composed(name.strip()), arrays


def _holds_arrays(value: Any) -> bool:
    return isinstance(value, Sequence | Mapping) or hasattr(value, "__array__")


def _input_name(name: Any, place: str) -> str:
    from fedloom.data.spec import INPUT_NAME

    if not isinstance(name, str) or not INPUT_NAME.fullmatch(name):
        raise DataError(f"{place} must have names of letters, digits and underscores (got {name!r}).", key="clients")
    return name


def _request(**options: Any) -> Request:
    """Return the request by which data in memory are read; raise ExperimentError for an unknown task or axis."""
    from typing import get_args

    from fedloom.data.pack.examples import Request
    from fedloom.data.spec import ChannelAxis
    from fedloom.tasks.names import TaskName

    for key, allowed in (("task", get_args(TaskName)), ("channel_axis", get_args(ChannelAxis))):
        value = options.get(key)
        if value is not None and value not in allowed:
            message = f"{key} must be one of {', '.join(allowed)} (got {value!r})."
            raise ExperimentError(message, key=key, found=value, allowed=allowed)
    return Request(**options)


def _text(options: Mapping[str, Any]) -> TextColumn:
    """Return the settings of a column of texts; raise ExperimentError if a key is wrong."""
    from pydantic import ValidationError

    from fedloom.data.folders import text_fault
    from fedloom.data.pack.examples import TextColumn

    try:
        return TextColumn.model_validate(options)
    except ValidationError as error:
        raise ExperimentError(f"text: {text_fault(error)}", key="text") from None


def _partition(scheme: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheme as ``data.partition``."""
    if not isinstance(scheme, Mapping):
        raise ExperimentError(
            f"scheme must be a mapping, such as {{'scheme': 'iid', 'clients': 20}} (got {scheme!r}).", key="scheme"
        )
    return dict(scheme)
