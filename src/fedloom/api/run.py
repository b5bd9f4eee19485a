"""A run, under way or finished, as Python sees it: its numbers as tables, its figures, its clients' models."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from fedloom.api.frames import of_csv, of_lines
from fedloom.errors import DataError, ExperimentError, FedloomError
from fedloom.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedloom.experiment import Experiment
    from fedloom.federation.folder import RunFolder
    from fedloom.runner.personal_model import PersonalModel


class Run:
    """A run, read from its files: what is looked at is what they hold then, also while the run goes on.

    Parameters
    ----------
    where
        Its folder, or the URL where it is published, which is copied to a temporary folder.

    Raises
    ------
    DataError
        If there is no run.
    StorageError, RefusedError
        If the store of a URL cannot be used.

    Attributes
    ----------
    where
        As given.
    """

    def __init__(self, where: str | Path) -> None:
        from fedloom.federation.folder import RunFolder
        from fedloom.storage import is_url, open_store

        self.where = str(where)
        self._figures: tuple[list[tuple[int, ...]], dict[str, Figure]] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if is_url(where):
            from fedloom.federation.published import Published

            self._temporary = tempfile.TemporaryDirectory(prefix="fedloom-run-")
            folder = RunFolder(Path(self._temporary.name))
            if not Published(folder, open_store(self.where), uuid.uuid4().hex).take_up():
                raise DataError(f"{where}: found no published run there")
            self._folder: RunFolder = folder
        else:
            self._folder = RunFolder(RunFolder.open(where).path.resolve())  # also for who changes the directory

    def __repr__(self) -> str:
        """Say where it is."""
        return f"fedloom.load({self.where!r})"

    @property
    def folder(self) -> Path:
        """The run's folder; of a published run, its copy here."""
        return self._folder.path

    @property
    def experiment(self) -> Experiment:
        """What was run, with every default filled in."""
        from fedloom import experiment as experiments

        return experiments.of_run(self.folder)

    @property
    def factory(self) -> str | None:
        """What makes the clients' model, where that is a module of the user's own."""
        from fedloom.experiment.yaml_reader import parse

        found, _ = parse(self._folder.text("experiment.yaml"), "experiment.yaml")
        factory = found["model"].get("factory")
        return None if factory is None else str(factory)

    @property
    def finished(self) -> bool:
        """Whether it has come to its end and has a summary."""
        return self._folder.has("summary.json")

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: the results of the last round and of the best, and what they cost (docs/evaluation.md).

        Raises
        ------
        DataError
            If the run is not finished.
        """
        if not self.finished:
            raise DataError(
                f"{self.where}: found no summary.json, because the run is not finished; allowed: history, or a run "
                "that is",
                hint="go on with resume=True",
            )
        return self._folder.json("summary.json")

    @property
    def history(self) -> DataFrame:
        """The evaluated rounds: a row each, by round; columns such as ``seen.accuracy_mean`` and ``train.loss``.

        Raises
        ------
        ExperimentError
            If pandas is not installed.
        """
        lines = {line["round"]: line for line in self._folder.evaluations()}  # after a resume, the later line
        frame = of_lines([lines[t] for t in sorted(lines)], "Run.history")
        return frame.set_index("round") if len(frame) else frame

    @property
    def clients(self) -> DataFrame:
        """The clients as they were last evaluated: a row each, by id (``clients.csv``).

        Raises
        ------
        DataError
            If nothing has been evaluated to the end yet.
        ExperimentError
            If pandas is not installed.
        """
        text = self._folder.text("clients.csv")
        return of_csv(text, "Run.clients", dtype={"id": str, "labels": str}, index_col="id")

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of the figures there are."""
        return tuple(self._drawn())

    def figure(self, name: str) -> Figure:
        """Return a figure of the report, as matplotlib has it.

        Parameters
        ----------
        name
            One of :attr:`figures`.

        Raises
        ------
        ExperimentError
            If there is none of that name, or matplotlib is not installed.
        """
        drawn = self._drawn()
        if name not in drawn:
            raise ExperimentError(f"figure: found {name!r}; allowed: {', '.join(drawn)}")
        figure = drawn[name]
        figure.patch.set_facecolor("white")  # on a page it is transparent
        return figure

    def _drawn(self) -> dict[str, Figure]:
        from fedloom.reporting.report import FILES, figures

        stamps = [_stamp(self.folder / name) for name in sorted({name for names in FILES.values() for name in names})]
        if self._figures is None or self._figures[0] != stamps:  # a run that goes on has others
            self._figures = stamps, figures(self.folder)
        return self._figures[1]

    @overload  # one id is a sequence of texts, too
    def models(  # type: ignore[overload-overlap]
        self,
        clients: str,
        *,
        checkpoint: Literal["last", "best"] | int = "last",
        predictor: str = "personal",
        packed: Sequence[str | Path] = (),
    ) -> PersonalModel: ...

    @overload
    def models(
        self,
        clients: Sequence[str] | None = None,
        *,
        checkpoint: Literal["last", "best"] | int = "last",
        predictor: str = "personal",
        packed: Sequence[str | Path] = (),
    ) -> dict[str, PersonalModel]: ...

    def models(
        self,
        clients: str | Sequence[str] | None = None,
        *,
        checkpoint: Literal["last", "best"] | int = "last",
        predictor: str = "personal",
        packed: Sequence[str | Path] = (),
    ) -> PersonalModel | dict[str, PersonalModel]:
        """Return the model of a client, seen or unseen; or those of several, by id.

        Parameters
        ----------
        clients
            One id or name of an owner, or several; None: all.
        checkpoint
            ``last``, ``best`` or a round.
        predictor
            ``personal``, or another that the method gives a client, such as ``global``.
        packed
            Folders of packed clients, of a run whose clients bring data of their own.

        Returns
        -------
        PersonalModel
            A module of torch: raw inputs ``[b, *input_shape]`` in, probabilities ``[b, C]`` out; the kind that
            :func:`fedloom.personalize` returns to a client that the run does not know.

        Raises
        ------
        DataError
            If there is no such client or checkpoint.
        ExperimentError
            If the method gives no such predictor.
        """
        from fedloom.runner.client_models import client_models

        one = isinstance(clients, str)
        wanted = [clients] if isinstance(clients, str) else clients
        made = client_models(self.folder, wanted, str(checkpoint), predictor, [Path(folder) for folder in packed])
        return next(iter(made.values())) if one else made

    def report(self) -> Path:
        """Write ``report.html`` and ``figures/`` anew, and return the path of the page."""
        from fedloom.reporting.report import write_report

        return write_report(self.folder)

    def _repr_html_(self) -> str:
        """What a notebook shows: the results of the last round."""
        from html import escape

        if not self.finished:
            return f"<p>{escape(self.where)}: a run that is not finished</p>"
        summary = self.summary
        title = f"{summary['titles'].get('personal', summary['algorithm'])} on {summary['dataset']}"
        rows = "".join(
            f"<tr><td>{label}</td><td>{group['clients']}</td><td>{shown}</td></tr>"
            for label, group in (
                ("seen", summary["seen"]),
                ("unseen", summary["unseen"]),
                ("global", summary["global"]),
            )
            if group is not None
            for shown in [_shown(group)]
        )
        return (
            f"<b>{escape(title)}</b>, seed {summary['seed']}, {counted(summary['rounds'], 'round')}: "
            f"<code>{escape(self.where)}</code><table><tr><th></th><th>clients</th><th>test</th></tr>{rows}</table>"
        )


def _shown(group: Mapping[str, Any]) -> str:
    if group["accuracy_mean"] is None:
        return f"loss {group['loss_mean']:.4g}"
    return f"accuracy {group['accuracy_mean']:.1%} ± {group['accuracy_std']:.1%} over clients"


class Sweep(Sequence[Run]):
    """The finished runs of a sweep, in the order of its grid.

    Attributes
    ----------
    folder
        Has a folder for each run.
    failures
        Why runs failed, by the names of their folders.
    """

    def __init__(self, folder: Path, runs: Sequence[Run], failures: Mapping[str, FedloomError]) -> None:
        self.folder = folder
        self.failures = dict(failures)
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, place: int) -> Run: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Run]: ...

    def __getitem__(self, place: int | slice) -> Run | Sequence[Run]:
        """Return a run by its place."""
        return self._runs[place]

    def __len__(self) -> int:
        """Number of finished runs."""
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        """Give the runs."""
        return iter(self._runs)

    def __repr__(self) -> str:
        """Say where it is, and how much of it there is."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<{counted(len(self), 'run')} in {self.folder}{failed}>"

    def compare(self) -> Comparison:
        """Put the runs side by side."""
        return Comparison([run.folder for run in self])


class Comparison:
    """Finished runs side by side; runs that differ in the seed alone are one row.

    Parameters
    ----------
    folders
        Of runs, or of what holds runs.
    against
        The method, or the label of a row, that the others are tested against; None: the best on validation.

    Raises
    ------
    DataError
        If one is not that of a finished run and holds none either.
    ExperimentError
        If they cannot be compared.
    """

    def __init__(self, folders: Sequence[str | Path], against: str | None = None) -> None:
        from fedloom.reporting.compare import compare

        self._comparison = compare(folders, against)

    @property
    def notices(self) -> tuple[str, ...]:
        """What should be known before the rows are compared."""
        return self._comparison.notices

    @property
    def table(self) -> DataFrame:
        """A row for each method and setting, means over seeds: fractions or losses, costs (``compare.csv``)."""
        from fedloom.reporting.compare_tables import rows_as_csv

        return of_csv(rows_as_csv(self._comparison), "Comparison.table", dtype={"seeds": str, "best_rounds": str})

    @property
    def pairs(self) -> DataFrame:
        """A row for each pair of rows: a test over seeds, or over the clients of one (``pairs.csv``)."""
        from fedloom.reporting.compare_tables import pairs_as_csv

        return of_csv(pairs_as_csv(self._comparison), "Comparison.pairs", dtype={"seeds": str})

    def write(self, folder: str | Path) -> Path:
        """Write ``compare.html``, tables and figures to a folder, and return the path of the page."""
        from fedloom.reporting.compare_report import PAGE, check_out, write_comparison

        check_out(Path(folder))
        write_comparison(self._comparison, Path(folder))
        return Path(folder) / PAGE

    def __repr__(self) -> str:
        """Show what each client would get, as text."""
        from fedloom.reporting.compare_tables import as_text, headings

        lines = ["  ".join(headings(self._comparison))]
        for title, rows in as_text(self._comparison).items():
            lines += [title, *("  ".join(cell.text for cell in row) for row in rows)]
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from html import escape

        from fedloom.reporting.compare_tables import as_text, headings

        found = ["<tr>", *(f"<th>{escape(title)}</th>" for title in headings(self._comparison)), "</tr>"]
        for title, rows in as_text(self._comparison).items():
            found.append(f"<tr><th colspan=99>{escape(title)}</th></tr>")
            for row in rows:
                tags = ("<b>", "</b>") if any(cell.mark == "best" for cell in row) else ("", "")
                found += ["<tr>", *(f"<td>{tags[0]}{escape(cell.text)}{tags[1]}</td>" for cell in row), "</tr>"]
        return f"<table>{''.join(found)}</table>"


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes whenever a file is written; nothing while it is not there."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return ()
    return about.st_ino, about.st_size, about.st_mtime_ns
