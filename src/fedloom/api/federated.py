"""Data in memory as the data of an experiment: arrays by client, a data set of torchvision, a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api.frames import pandas
from fedloom.errors import DataError, ExperimentError
from fedloom.words import composed, named_twice

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
            ``[n, height, width]`` or ``[n, channels, height, width]``; ``y`` ``[n]`` integers, or names of
            classes: the different ones are the classes, and with ``classes`` an integer is a position in them.
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
        from fedloom.data.values import as_array

        parts = []
        for name, given in clients.items():
            if not isinstance(name, str) or not name.strip():
                raise DataError(f"clients: found the name {name!r}; allowed: text")
            if not isinstance(given, Mapping):
                if not isinstance(given, Sequence) or len(given) != 2:
                    raise DataError(f"client {name}: found a {type(given).__name__}; allowed: (x, y), or a dict")
                given = dict(zip("xy", given, strict=True))
            parts.append(
                (
                    composed(name.strip()),
                    {key: as_array(value, f"client {name}: {key}") for key, value in given.items()},
                )
            )
        if (twice := named_twice([name for name, _ in parts])) is not None:
            raise DataError(f"clients: the name {twice!r} is there twice; each client needs a name of its own")
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
        told: list[tuple[str, Sequence[str]]] = []
        given = (
            {"": ("dataset", dataset)} if test is None else {"train_": ("dataset", dataset), "test_": ("test", test)}
        )
        for prefix, (what, one) in given.items():
            arrays[f"{prefix}x"], arrays[f"{prefix}y"], notes = read_items(one, what)
            told.append((what, notes))
        made = cls._kept([(None, arrays)], classes, root, {"partition": partition, **settings})
        for what, of_one in told:
            tell_notes([f"{what} ({Path(made.section['source']['path']).name}): {note}" for note in of_one])
        return made

    @classmethod
    def from_frame(
        cls,
        frame: DataFrame,
        *,
        label: str | int,
        client: str | int | None = None,
        scheme: Mapping[str, Any] | None = None,
        root: str | Path | None = None,
        **settings: Any,
    ) -> Federated:
        """Make examples of the rows of a DataFrame; all columns but those named are features.

        Parameters
        ----------
        label
            The column with the classes, by its name or number.
        client
            The column that says whose a row is: each is a client, unless a scheme deals the rows out.
        scheme
            As of :meth:`from_torchvision`; needed without ``client``.
        root, settings
            As of :meth:`from_arrays`.

        Raises
        ------
        DataError
            If a column is missing or there twice, or holds no numbers, or a value is missing, or labels are neither
            whole numbers nor names: the column and the row.
        """
        from fedloom.data.local import of_frame

        if not isinstance(frame, pandas("from_frame").DataFrame):
            raise DataError(f"frame: it is a {type(frame).__name__}; give a DataFrame of pandas")
        if client is None and scheme is None:
            raise ExperimentError("from_frame: give client, or scheme, or both")
        partition = _partition(NATURAL if scheme is None else scheme)
        path = of_frame(frame, str(label), None if client is None else str(client), root)
        return cls._at(path, root, {"partition": partition, **settings})

    @classmethod
    def _kept(
        cls,
        parts: Sequence[tuple[str | None, Mapping[str, Any]]],
        classes: Sequence[str] | None,
        root: str | Path | None,
        settings: Mapping[str, Any],
    ) -> Federated:
        from fedloom.data.local import of_arrays

        return cls._at(of_arrays(parts, classes, root), root, settings)

    @classmethod
    def _at(cls, path: Path, root: str | Path | None, settings: Mapping[str, Any]) -> Federated:
        home = {} if root is None else {"root": str(Path(root).expanduser().absolute())}
        return cls({"dataset": "arrays", "source": {"path": str(path.absolute())}, **home, **settings})

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

        from fedloom.data.local import tell_notes
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
        tell_notes(data.opened().notes)
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
