"""Runs in Python, in progress or finished: tables, figures and the clients' models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from fedloom.api.frames import frame_from_csv, frame_from_lines
from fedloom.core.home import expanded
from fedloom.core.words import pluralize
from fedloom.errors import DataError, ExperimentError, FedloomError
from fedloom.tasks.names import GROUPS, Headline, headline_of, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedloom.experiment import Experiment
    from fedloom.serving.personal_model import PersonalModel


class Run:
    """Run whose files are read on each access, even while it is in progress.

    Parameters
    ----------
    where
        Folder of the run, or the URL of a published run, which is copied to a temporary folder.

    Raises
    ------
    DataError
        If there is no such run.
    StorageError, RefusedError
        If the URL's store cannot be used.

    Attributes
    ----------
    where
        The location as given.
    """

    def __init__(self, where: str | Path) -> None:
        from fedloom.runs.folder import RunFolder

        self.where = str(where)
        self._run = RunFolder.open(where)
        self._run.path = self._run.path.resolve()  # survives a change of working directory
        self._figures: tuple[list[tuple[int, ...]], dict[str, Figure]] | None = None

    def __repr__(self) -> str:
        return f"fedloom.load({self.where!r})"

    @property
    def folder(self) -> Path:
        """Folder of the run; for a published run, its local copy."""
        return self._run.path

    @property
    def experiment(self) -> Experiment:
        """Experiment of the run, with every default filled in."""
        return self._run.experiment()

    @property
    def factory(self) -> str | None:
        """Factory of the clients' model, if that is the user's own module."""
        factory = self._run.stored_experiment()["model"].get("factory")
        return None if factory is None else str(factory)

    @property
    def finished(self) -> bool:
        """True if the run has ended and has a summary."""
        return self._run.is_finished

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``: results of the last and the best round, and their cost (docs/evaluation.md).

        Raises
        ------
        DataError
            If the run is not finished.
        """
        if not self.finished:
            raise DataError(
                f"{self.where} has no summary.json, because the run is not finished; see history.",
                hint="continue with resume=True",
            )
        return self._run.json("summary.json")

    @property
    def audit(self) -> dict[str, Any]:
        """Content of ``audit.json``: results of the attacks of :func:`fedloom.audit` (docs/audit.md).

        Raises
        ------
        DataError
            If the run has not been audited.
        """
        from fedloom.runs.files import AUDIT

        if not self._run.has(AUDIT):
            raise DataError(f"{self.where} has no {AUDIT}, because the run has not been audited.", hint="fedloom.audit")
        return self._run.json(AUDIT)

    @property
    def history(self) -> DataFrame:
        """Evaluated rounds, a row each, indexed by round; columns such as ``seen.accuracy_mean`` and ``train.loss``.

        Raises
        ------
        ExperimentError
            If pandas is not installed.
        """
        lines = {line["round"]: line for line in self._run.evaluations()}  # after a resume, the later line
        frame = frame_from_lines([lines[t] for t in sorted(lines)], "Run.history")
        return frame.set_index("round") if len(frame) else frame

    @property
    def clients(self) -> DataFrame:
        """Clients as last evaluated, a row each, indexed by id (``clients.csv``).

        Raises
        ------
        DataError
            If no evaluation has been completed yet.
        ExperimentError
            If pandas is not installed.
        """
        text = self._run.text("clients.csv")
        return frame_from_csv(text, "Run.clients", dtype={"id": str, "labels": str}, index_col="id")

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the available figures."""
        return tuple(self._drawn())

    def figure(self, name: str) -> Figure:
        """Return a figure of the report as a matplotlib figure.

        Parameters
        ----------
        name
            One of :attr:`figures`.

        Raises
        ------
        ExperimentError
            If there is no figure of that name, or matplotlib is not installed.
        """
        figures = self._drawn()
        if name not in figures:
            raise ExperimentError(
                f"There is no figure {name!r}; name must be one of {', '.join(figures)}.",
                key="name",
                found=name,
                allowed=list(figures),
            )
        figure = figures[name]
        figure.patch.set_facecolor("white")  # on a page it is transparent
        return figure

    def _drawn(self) -> dict[str, Figure]:
        from fedloom.reporting.report import figures, source_files

        stamps = [_stamp(self.folder / name) for name in source_files()]
        if self._figures is None or self._figures[0] != stamps:  # figures of a run in progress change
            self._figures = stamps, figures(self.folder)
        return self._figures[1]

    @overload  # a str is a Sequence[str], too
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
        """Return the model of one client, seen or unseen, or the models of several, by id.

        Parameters
        ----------
        clients
            One id or owner name, or several; None: all clients.
        checkpoint
            ``last``, ``best`` or a round.
        predictor
            ``personal``, or another predictor of the method, such as ``global``.
        packed
            Folders of packed clients, for a run whose clients have data of their own.

        Returns
        -------
        PersonalModel
            Torch module that maps raw inputs ``[b, *input_shape]`` to probabilities ``[b, C]``, like the models that
            :func:`fedloom.personalize` returns to new clients.

        Raises
        ------
        DataError
            If there is no such client or checkpoint.
        ExperimentError
            If the method has no such predictor.
        """
        from fedloom.serving.client_models import client_models

        one = isinstance(clients, str)
        clients_wanted = [clients] if isinstance(clients, str) else clients
        models = client_models(
            self.folder, clients_wanted, str(checkpoint), predictor, [expanded(folder) for folder in packed]
        )
        return next(iter(models.values())) if one else models

    def report(self) -> Path:
        """Rewrite ``report.html`` and ``figures/``; return the path of the page."""
        from fedloom.reporting.report import write_report

        return write_report(self.folder)

    def _repr_html_(self) -> str:
        """Return the results of the last round as HTML for a notebook."""
        from html import escape

        if not self.finished:
            return f"<p>{escape(self.where)}: unfinished run</p>"
        summary = self.summary
        title = f"{summary['titles'].get('personal', summary['algorithm'])} on {summary['dataset']}"
        groups, headline = [(name, summary[name]) for name in GROUPS if summary[name] is not None], headline_of(summary)
        rows = "".join(
            f"<tr><td>{name}</td><td>{group['clients']}</td><td>{_shown(group, headline)}</td></tr>"
            for name, group in groups
        )
        return (
            f"<b>{escape(title)}</b>, seed {summary['seed']}, {pluralize(summary['rounds'], 'round')}: "
            f"<code>{escape(self.where)}</code><table><tr><th></th><th>clients</th><th>test</th></tr>{rows}</table>"
        )


def _shown(group: Mapping[str, Any], headline: Headline) -> str:
    """Return a group's headline metric: the mean, and the standard deviation over clients if it is known."""
    mean, std, *_ = values_of(group, headline)
    if mean is None:
        return headline.title
    unit = "%" if headline.percent else ""
    spread = "" if std is None else f" ± {headline.shown(std)}{unit} over clients"
    return f"{headline.title} {headline.shown(mean)}{unit}{spread}"


class RunSequence(Sequence[Run]):
    """Runs in the subfolders of a folder.

    Attributes
    ----------
    folder
        Folder that holds one folder per run.
    """

    def __init__(self, folder: Path, runs: Iterable[Run]) -> None:
        self.folder = folder
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, place: int) -> Run: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Run]: ...

    def __getitem__(self, place: int | slice) -> Run | Sequence[Run]:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)


class Sweep(RunSequence):
    """Finished runs of a sweep, in the order of its grid.

    Attributes
    ----------
    folder
        Folder that holds one folder per run.
    failures
        Errors of failed runs, by folder name.
    """

    def __init__(self, folder: Path, runs: Sequence[Run], failures: Mapping[str, FedloomError]) -> None:
        super().__init__(folder, runs)
        self.failures = dict(failures)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<{pluralize(len(self), 'run')} in {self.folder}{failed}>"

    def compare(self) -> Comparison:
        """Compare the runs."""
        return Comparison([run.folder for run in self])


class Comparison:
    """Comparison of finished runs; runs that differ only in the seed form one row.

    Parameters
    ----------
    folders
        Folders of runs, or folders that hold runs.
    against
        Baseline for the tests: a method, or a row's label; None: the best on validation.

    Raises
    ------
    DataError
        If a folder is not a finished run and holds none.
    ExperimentError
        If the runs cannot be compared.
    """

    def __init__(self, folders: Sequence[str | Path], against: str | None = None) -> None:
        from fedloom.reporting.compare import compare_runs

        self._comparison = compare_runs(folders, against)

    @property
    def notices(self) -> tuple[str, ...]:
        """Caveats for the comparison."""
        return self._comparison.notices

    @property
    def table(self) -> DataFrame:
        """Row for each method and setting, with means over seeds: fractions or losses, and costs (``compare.csv``)."""
        from fedloom.reporting.compare_tables import rows_as_csv

        return frame_from_csv(
            rows_as_csv(self._comparison), "Comparison.table", dtype={"seeds": str, "best_rounds": str}
        )

    @property
    def pairs(self) -> DataFrame:
        """Row for each pair of compared rows: a test over seeds, or over the clients of one seed (``pairs.csv``)."""
        from fedloom.reporting.compare_tables import pairs_as_csv

        return frame_from_csv(pairs_as_csv(self._comparison), "Comparison.pairs", dtype={"seeds": str})

    def write(self, folder: str | Path) -> Path:
        """Write ``compare.html``, tables and figures to a folder; return the path of the page."""
        from fedloom.reporting.compare_page import write_comparison

        return write_comparison(self._comparison, folder)

    def __repr__(self) -> str:
        from fedloom.reporting.compare_tables import terminal_table

        table = terminal_table(self._comparison)
        lines = ["  ".join(table.headings)]
        for title, rows in table.blocks:
            lines += [title, *("  ".join(cell.text for cell in row.cells) for row in rows)]
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        from html import escape

        from fedloom.reporting.compare_tables import terminal_table

        table = terminal_table(self._comparison)
        parts = ["<tr>", *(f"<th>{escape(heading)}</th>" for heading in table.headings), "</tr>"]
        for title, rows in table.blocks:
            parts.append(f"<tr><th colspan=99>{escape(title)}</th></tr>")
            for row in rows:
                tags = ("<b>", "</b>") if any(cell.mark == "best" for cell in row.cells) else ("", "")
                parts += ["<tr>", *(f"<td>{tags[0]}{escape(cell.text)}{tags[1]}</td>" for cell in row.cells), "</tr>"]
        return f"<table>{''.join(parts)}</table>"


def _stamp(path: Path) -> tuple[int, ...]:
    """Return values that change whenever a file is written; empty while the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
