"""Pages: the list of runs, a run, its report, a client, a comparison, and a live federation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from fedloom.core.words import duration, pluralize, printable
from fedloom.errors import DataError, FedloomError
from fedloom.federation.activity import OVER, Activity, RosterClient
from fedloom.federation.status_text import client_table, federation_facts, federation_heading
from fedloom.reporting.page import PageSection, Part, ReportPage, ReportSection, one_block, table_row
from fedloom.reporting.report import report_page
from fedloom.reporting.words import shown_epsilon
from fedloom.runs.files import PARTITION
from fedloom.runs.listing import RUNNING
from fedloom.ui.parts import client_index, client_methods, client_rounds, disclosed, log_tail
from fedloom.ui.watch import RunWatch, Signature, WatchedRun

OF_REPORT = ("Learning curves", "Results", "Privacy", "Settings", "Environment")
"""Sections of the report on a run's page; the whole report is a link away."""

COLUMNS: Mapping[str, Callable[[WatchedRun], Any]] = {
    "run": lambda run: run.name,
    "state": lambda run: run.entry.state,
    "method": lambda run: run.entry.method or "",
    "data": lambda run: run.entry.dataset or "",
    "seed": lambda run: run.entry.seed or 0,
    "rounds": lambda run: run.entry.done or 0,
    "time left": lambda run: run.remaining_s or 0.0,
    "validation": lambda run: _number(run.entry.validation),
    "seen": lambda run: _number(run.entry.seen),
    "unseen": lambda run: _number(run.entry.unseen),
    "ε": lambda run: _number(run.entry.epsilon),
    "changed": lambda run: run.entry.changed or 0.0,
}
"""Columns of the list of runs, and the keys that order it."""

MOST_RUNS, MOST_CLIENTS, MOST_OTHERS = 2000, 1000, 50
"""Maximum numbers of runs in the list, of clients of a live federation, and of runs on a client's page."""

MOST_PAGES = 64
"""Maximum number of drawn pages that are kept."""


class NoSuchPage(DataError):
    """A page that does not exist, such as that of a run that has been removed."""


class LiveFederation(NamedTuple):
    """Live federation: its address, and the calls that ask its aggregator."""

    address: str
    activity: Callable[[], Activity]
    clients: Callable[[], Sequence[RosterClient]]


class Site:
    """Pages about the runs in a folder, and about a live federation.

    Any thread may ask for a page. Figures are drawn by one thread at a time, as Matplotlib requires.
    """

    def __init__(self, folder: Path, federation: LiveFederation | None = None) -> None:
        self.watch = RunWatch(folder)
        self._folder, self._federation = printable(str(folder)), federation
        self._drawing = threading.Lock()
        self._kept: dict[tuple[str, ...], tuple[Signature, float, ReportPage]] = {}

    def list_page(self, query: str, sort: str) -> str:
        """Return the list of runs that have all words of a query, ordered by a column, or by ``-`` and a column."""
        runs, unread = self.watch.read()
        words, column, states = query.lower().split(), sort.removeprefix("-"), [r.entry.state for r in runs.values()]
        shown = [run for run in runs.values() if all(word in _described(run) for word in words)]
        shown.sort(key=COLUMNS["run"])
        shown.sort(key=COLUMNS.get(column, COLUMNS["changed"]), reverse=sort.startswith("-") or column not in COLUMNS)
        if column not in COLUMNS:
            shown.sort(key=lambda run: run.entry.state != RUNNING)
        notices = [f"{unread:,} more are being read."] if unread else []
        if not self.watch.folder.is_dir():
            notices = [f"The folder {self._folder} does not exist any more."]
        if len(shown) > MOST_RUNS:
            notices.append(f"{MOST_RUNS:,} of {len(shown):,} runs are shown; filter them, or order them otherwise.")
        return self._rendered(
            ReportPage("Runs", (f"{pluralize(len(runs), 'run')} in {self._folder}",), (), {}, notices=tuple(notices)),
            "runs.html.j2",
            counts=", ".join(f"{states.count(state):,} {state}" for state in sorted(set(states))),
            rows=[_row(run) for run in shown[:MOST_RUNS]],
            orders=[(name, "-" * (sort == name) + name, sort in (name, f"-{name}")) for name in COLUMNS],
            query=query,
            sort=sort,
            unread=unread,
        )

    def run_page(self, name: str) -> str:
        """Return the page of a run."""
        watched = self._run(name)
        page = self._keep(("run", name), watched.signature, lambda: self._of_files(watched))
        now = (ReportSection("Status", lambda run: self._status(watched)), ReportSection("Log", log_tail))
        first, last = (section.page_section(watched.folder) for section in now)
        page = replace(page, sections=tuple(filter(None, (first, *page.sections, last))))
        return self._rendered(page, "run.html.j2", row=_row(watched), contents=page.sections)

    def report(self, name: str) -> str:
        """Return the report of a run, with all sections."""
        watched = self._run(name)
        page = self._keep(("report", name), watched.signature, lambda: report_page(watched.folder))
        return self._rendered(page, back=link("run", name), contents=page.sections)

    def client_page(self, name: str, client: str) -> str:
        """Return the page of a client of a run: its data, its rounds, and its results in other runs."""
        watched = self._run(name)
        run = watched.folder
        entry = next((one for one in run.manifest().clients if one.id == client), None)
        if entry is None:
            raise NoSuchPage(f"{printable(name)} has no client {printable(client)}.")
        digest = run.accepted_digest(PARTITION)
        others = [each for each in self.watch.read()[0].values() if each.entry.fault is None]
        others = [each for each in others if each.folder.accepted_digest(PARTITION) == digest]
        others.sort(key=COLUMNS["changed"], reverse=True)
        runs = [(each, link("client", each.name, id=client)) for each in others[:MOST_OTHERS]]
        sections = (
            ReportSection("Methods", lambda run: client_methods(client, runs)),
            ReportSection("Rounds", lambda run: client_rounds(run, client)),
        )
        owner = f", data of {entry.owner}" if entry.owner else ""
        sizes = f"{entry.train:,} training, {entry.validation:,} validation and {entry.test:,} test examples"
        about = f"{'seen' if entry.seen else 'unseen'} client{owner}, {sizes}"
        found = tuple(filter(None, (section.page_section(run) for section in sections)))
        return self._rendered(ReportPage(client, (about,), found, {}), back=link("run", name))

    def comparison(self, names: Sequence[str]) -> str:
        """Return the comparison of some finished runs."""
        from fedloom.reporting.compare import compare_runs
        from fedloom.reporting.compare_page import page_of

        if not names:
            raise NoSuchPage("No run is ticked; tick two or more runs in the list, and compare them.")
        watched = [self._run(name) for name in dict.fromkeys(names)]
        usable = [run for run in watched if run.folder.is_finished and run.entry.fault is None]
        others = [run for run in watched if run not in usable]
        left_out = [f"{printable(run.name)} is left out: it is {run.entry.state}." for run in others]
        if not usable:
            raise DataError(f"None of these runs can be compared. {' '.join(left_out)}")
        key, signature = ("compare", *(run.name for run in usable)), tuple(run.signature for run in usable)
        page = self._keep(key, signature, lambda: page_of(compare_runs([run.entry.path for run in usable])))
        return self._rendered(replace(page, notices=(*left_out, *page.notices)), contents=page.sections)

    def federation(self) -> str:
        """Return the page of the live federation."""
        if self._federation is None:
            raise NoSuchPage("No federation is watched; start `fedloom ui` with --aggregator HOST:PORT.")
        title = f"Federation at {self._federation.address}"
        try:
            now = self._federation.activity()
            headings, rows, texts = client_table(self._federation.clients())
        except FedloomError as error:  # shown until the aggregator answers again
            notices = tuple(map(printable, str(error).splitlines()))
            return self._rendered(ReportPage(title, (), (), {}, notices=notices), live=True)
        clients = one_block(headings, [table_row(*row) for row in rows[:MOST_CLIENTS]], text_columns=len(texts))
        sections = (
            PageSection("Status", (_activity(now),)),
            PageSection(pluralize(len(rows), "client"), (Part(tables=(clients,)),) if rows else ()),
        )
        return self._rendered(ReportPage(title, (printable(federation_heading(now)),), sections, {}), live=True)

    def message(self, title: str, text: str, template: str = "site.html.j2", **context: Any) -> str:
        """Return a page with a message, one paragraph for each line."""
        return self._rendered(ReportPage(title, (), (), {}, notices=tuple(text.splitlines())), template, **context)

    def _run(self, name: str) -> WatchedRun:
        run = self.watch.find(name)
        if run is None:
            raise NoSuchPage(f"There is no run {printable(name)} in {self._folder}.")
        return run

    def _of_files(self, watched: WatchedRun) -> ReportPage:
        """Return the sections of a run's page that change only with its files."""
        page, run = report_page(watched.folder, OF_REPORT), watched.folder
        curves, results, *rest = page.sections
        clients = ReportSection(
            "Clients", lambda run: client_index(run, lambda id: link("client", watched.name, id=id))
        )
        own = (
            section.page_section(run) for section in (ReportSection("What has left the clients", disclosed), clients)
        )
        return replace(page, sections=tuple(filter(None, (curves, results, *own, *rest))))

    def _status(self, watched: WatchedRun) -> Part:
        return _activity(self.watch.activity(watched))

    def _keep(self, key: tuple[str, ...], signature: Signature, build: Callable[[], ReportPage]) -> ReportPage:
        """Return a page as built for this signature, or a little earlier, so that drawing takes a tenth of the time."""

        def current() -> ReportPage | None:
            kept, until, page = self._kept.get(key, ((), 0.0, None))
            return page if kept == signature or time.monotonic() < until else None

        if (page := current()) is not None:
            return page
        with self._drawing:
            if (page := current()) is None:  # no other thread has built it meanwhile
                start, page = time.monotonic(), build()
                self._kept.pop(key, None)
                while len(self._kept) >= MOST_PAGES:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = signature, start + 10 * (time.monotonic() - start), page
            return page

    def _rendered(self, page: ReportPage, template: str = "site.html.j2", **context: Any) -> str:
        frame = {"back": None, "contents": (), "live": False, "watches": self._federation is not None}
        return page.render(template, "fedloom.ui", **{**frame, **context})


def link(page: str, name: str, **query: str) -> str:
    """Return the link to a page about a run."""
    return f"/{page}/{quote(name)}" + (f"?{urlencode(query)}" if query else "")


def _row(run: WatchedRun) -> dict[str, Any]:
    """Return the cells of a run in the list."""
    e = run.entry
    return {
        "name": run.name,
        "href": link("run", run.name),
        "report": link("report", run.name),
        "entry": e,
        "left": "" if run.remaining_s is None else duration(run.remaining_s),
        "scores": [e.score(value) for value in (e.validation, e.seen, e.unseen)],
        "epsilon": shown_epsilon(e.epsilon) if e.private else "",
        "changed": "" if e.changed is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(e.changed)),
    }


def _described(run: WatchedRun) -> str:
    e = run.entry
    return " ".join(map(str, (run.name, e.name, e.method, e.dataset, e.state, f"seed:{e.seed}"))).lower()


def _number(value: float | None) -> float:
    return -1.0 if value is None else value


def _activity(now: Activity) -> Part:
    """Return the facts about a federation that `fedloom status` shows, and the time left."""
    left = () if now.remaining_s is None else (("time left", f"about {duration(now.remaining_s)}"),)
    aging = ("durable",) if now.phase in OVER else ()
    facts = ((name, printable(text)) for name, text in federation_facts(now) if name not in aging)
    return Part(pairs=(*left, *facts))
