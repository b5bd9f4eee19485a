"""Data in memory as the data of an experiment: arrays by client, a data set of torchvision, a DataFrame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api.frames import pandas
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedloom.data.federated import FederatedDataset

NATURAL: Mapping[str, Any] = {"scheme": "natural"}
"""A client for each owner."""


class Federated:
    """Clients' data for ``fedloom.run(..., data=...)``, kept in the data root and named there by a hash of the content.

    So a run is resumed, loaded and compared like any other, also in another process; equal arrays are the same data.

    Parameters
    ----------
    section
        The section ``data`` of an experiment.

    Attributes
    ----------
    section
        As given.

    Raises
    ------
    ExperimentError
        If it is no mapping.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        if not isinstance(section, Mapping):
            raise ExperimentError(
                f"section: found {section!r:.80}; allowed: the section data of an experiment as a mapping, such as "
                '{"dataset": "mnist", ...}; of data in memory Federated.from_arrays, from_torchvision or from_frame'
            )
        self.section = dict(section)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, tuple[Any, Any] | Mapping[str, Any]],
        *,
        classes: Sequence[str] | None = None,
        root: str | Path | None = None,
        **settings: Any,
    ) -> Federated:
        """Make a client of each entry.

        Parameters
        ----------
        clients
            By name ``(x, y)``, or ``{"train_x": ..., "train_y": ..., "test_x": ..., "test_y": ...}``: numpy arrays,
            torch tensors or lists. ``x`` are numbers ``[n, features]``, or pixels from 0 to 255 as uint8,
            ``[n, height, width]`` or ``[n, channels, height, width]``; ``y`` ``[n]`` integers from 0, or names of
            classes.
        classes
            Names of the classes, in the order of the labels; None: those that are found.
        root
            Folder to keep them in; None: ``$FEDLOOM_DATA``, else ``~/.cache/fedloom``.
        settings
            Further keys of ``data``, such as ``unseen_fraction=0.2``; ``partition={"scheme": "natural", ...}``.

        Raises
        ------
        DataError
            If arrays are not of one length, shape and kind, a label is unknown, or a number is not finite: whose, which
            array, what was found and what is allowed.
        """
        if not isinstance(clients, Mapping) or not clients:
            found = "none" if not clients else f"a {type(clients).__name__}"
            raise DataError(f"clients: found {found}; allowed: a dict of (x, y) by client")
        parts = []
        for name, given in clients.items():
            if not isinstance(name, str) or not name.strip():
                raise DataError(f"clients: found the name {name!r}; allowed: text")
            if not isinstance(given, Mapping):
                if not isinstance(given, Sequence) or len(given) != 2:
                    raise DataError(f"client {name}: found a {type(given).__name__}; allowed: (x, y), or a dict")
                given = dict(zip("xy", given, strict=True))
            parts.append((name, {key: _array(value, f"client {name}: {key}") for key, value in given.items()}))
        return cls._kept(parts, classes, root, {"partition": NATURAL, **settings})

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
        """Deal a data set of torchvision out to clients.

        Parameters
        ----------
        dataset
            Its examples, ``(image, label)`` each: without a transform, or with ``ToTensor`` alone. Images are
            Pillow's of 8 bits a channel, tensors ``[channels, height, width]`` or arrays ``[height, width,
            channels]``; labels whole numbers from 0, or names of classes. Palettes become RGB and booleans 0 and 255,
            with a warning in the log ``fedloom.data``.
        scheme
            Who gets which, as ``data.partition`` of an experiment:
            ``{"scheme": "dirichlet", "clients": 20, "alpha": 0.1}``.
        test
            Another one, for testing; None: a fifth of the examples.
        classes, root, settings
            As of :meth:`from_arrays`; without ``classes``, those of the data set.

        Raises
        ------
        DataError
            If an example is no image and label, a pixel or label cannot be kept exactly, images are of several sizes,
            or there are fewer or more examples than ``len(dataset)``.
        ExperimentError
            If the scheme is not a mapping. What is in it is checked where it is used.
        """
        from fedloom.data.local import tell_notes
        from fedloom.data.pack.items import read_items

        partition = _partition(scheme)
        if classes is None:
            classes = getattr(dataset, "classes", None)
        arrays: dict[str, Any] = {}
        given = (
            {"": ("dataset", dataset)} if test is None else {"train_": ("dataset", dataset), "test_": ("test", test)}
        )
        for prefix, (what, one) in given.items():
            arrays[f"{prefix}x"], arrays[f"{prefix}y"], notes = read_items(one, what)
            tell_notes(what, notes)
        return cls._kept([(None, arrays)], classes, root, {"partition": partition, **settings})

    @classmethod
    def from_frame(
        cls,
        frame: DataFrame,
        *,
        label: str,
        client: str | None = None,
        scheme: Mapping[str, Any] | None = None,
        root: str | Path | None = None,
        **settings: Any,
    ) -> Federated:
        """Make examples of the rows of a DataFrame; all columns but those named are features.

        Parameters
        ----------
        label
            The column with the classes.
        client
            The column that says whose a row is: each is a client, unless a scheme deals the rows out.
        scheme
            As of :meth:`from_torchvision`; needed without ``client``.
        root, settings
            As of :meth:`from_arrays`.

        Raises
        ------
        DataError
            If a column is missing or there twice, or holds no numbers, or a value is missing, or a label is neither
            a whole number nor a name: the column and the row.
        """
        import numpy as np

        if not isinstance(frame, pandas("from_frame").DataFrame):
            raise DataError(f"frame: found a {type(frame).__name__}; allowed: a DataFrame of pandas")
        columns = [str(name) for name in frame.columns]
        if twice := [name for i, name in enumerate(columns) if name in columns[:i]]:
            raise DataError(f"frame: found two columns {twice[0]!r}; allowed: columns of different names")
        frame = frame.set_axis(columns, axis=1)
        for option, name in (("label", label), ("client", client)):
            if name is not None and name not in columns:
                raise DataError(f"{option}: found no column {name!r}; allowed: {', '.join(columns)}")
        if client is None and scheme is None:
            raise ExperimentError("from_frame: found neither client nor scheme; allowed: one of them, or both")
        partition = _partition(NATURAL if scheme is None else scheme)
        kind = frame[label].dtype.kind
        features = [name for name in columns if name not in (label, client)]
        for name in features:
            if frame[name].dtype.kind not in "iufb":
                raise DataError(f"column {name!r}: found {frame[name].dtype}; allowed: numbers, or a frame without it")
            values = frame[name].to_numpy(dtype="float64", na_value=math.nan)
            wrong = [int(place) for place in np.flatnonzero(~np.isfinite(values))]
            if wrong:
                others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise DataError(
                    f"column {name!r}: found {values[wrong[0]]} in row {frame.index[wrong[0]]!r}{others}; allowed: a "
                    "finite number"
                )
        for name in (label, *([] if client is None else [client])):
            if (missing := frame.index[frame[name].isna()].tolist())[:1]:
                raise DataError(f"column {name!r}: found no value in row {missing[0]!r}; allowed: one in each row")

        if kind == "f":
            parted = frame.index[frame[label] % 1 != 0].tolist()
            if parted:
                found = frame[label].loc[parted[0]]
                raise DataError(
                    f"column {label!r}: found {found} in row {parted[0]!r}; allowed: integers from 0, or names of "
                    "classes"
                )

        def arrays(rows: Any, whose: str) -> dict[str, Any]:
            y = rows[label].to_numpy(dtype="int64") if kind in "iuf" else [str(value) for value in rows[label]]
            return {"x": _array(rows[features].to_numpy(dtype="float64"), whose), "y": _array(y, whose)}

        parts: list[tuple[str | None, Mapping[str, Any]]]
        if client is None:
            parts = [(None, arrays(frame, "frame"))]
        else:
            parts = [(str(name), arrays(rows, f"client {name}")) for name, rows in frame.groupby(client, sort=True)]
        return cls._kept(parts, None, root, {"partition": partition, **settings})

    @classmethod
    def _kept(
        cls,
        parts: Sequence[tuple[str | None, Mapping[str, Any]]],
        classes: Sequence[str] | None,
        root: str | Path | None,
        settings: Mapping[str, Any],
    ) -> Federated:
        from fedloom.data.local import of_arrays

        path = of_arrays(parts, classes, root)
        home = {} if root is None else {"root": str(root)}
        return cls({"dataset": "arrays", "source": {"path": str(path)}, **home, **settings})

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """Return the section ``data``, as sections of an experiment do."""
        return self.section

    def open(self, seed: int = 1) -> FederatedDataset:
        """Return the partition that an experiment with this seed has: its clients, and their examples.

        Raises
        ------
        ExperimentError
            If a key is unknown, or the scheme cannot be met with these data.
        """
        from pydantic import ValidationError

        from fedloom.experiment.loading import plain
        from fedloom.experiment.sections import Data
        from fedloom.experiment.validation_errors import explain, listing
        from fedloom.runner.assemble import make_data

        section = plain(self.section, "data")
        try:
            data = Data.model_validate(section)
        except ValidationError as error:
            mistakes = explain(error, Data.model_json_schema(), section)
            raise ExperimentError(listing("data", mistakes, {})) from None
        return make_data(data, seed)

    def __repr__(self) -> str:
        """Say where it is kept, and how it is dealt out."""
        return f"Federated({self.section!r})"


def _partition(scheme: Mapping[str, Any]) -> dict[str, Any]:
    """A scheme as ``data.partition``."""
    if not isinstance(scheme, Mapping):
        raise ExperimentError(
            f"scheme: found {scheme!r}; allowed: a mapping, such as {{'scheme': 'iid', 'clients': 20}}"
        )
    return dict(scheme)


def _array(value: Any, what: str) -> Any:
    """Anything like an array as one of numpy's."""
    import numpy as np

    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: found no array ({str(error).splitlines()[0]}); allowed: rows of one length"
        ) from error
    if found.dtype == object and not all(isinstance(item, str) for item in found.reshape(-1).tolist()):
        raise DataError(f"{what}: found an array of objects; allowed: numbers, or names of classes")
    return found
