"""How a run is carried out, as whoever starts it wants it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedloom.trust.options import ServerOptions


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; none of it changes a number.

    Attributes
    ----------
    out
        The run's folder; None: one named after the experiment.
    resume
        Go on with what the folder holds, or with what is published.
    replay
        A run whose journal is repeated.
    partition
        Folder or URL of the partition; None: the experiment's is made here.
    data, observe
        Folders of packed clients, where the experiment has ``data.own``: of those that train, and of those that are
        measured alone.
    publish
        URL to publish the run at; None: below ``storage``, where that is a store.
    name
        What the run is called there; None: as its folder.
    listen
        ``host:port`` where workers may come; None: the run has workers of its own.
    protection
        How an aggregator that listens is protected; None: not at all, and only this machine is served.
    audit
        Its audit log; None: ``logs/audit.jsonl`` of the run's folder.
    wait_s
        Seconds until every client must be served by workers that come; workers of the run's own are waited for while
        they live.
    orphan_after_s
        Seconds without a watcher after which the run stops; None: it need not be watched.
    health
        ``host:port`` of a port for probes: health in plaintext, and nothing else; None: none.
    metrics
        ``host:port`` of a port for Prometheus; None: none.
    stay
        Serve the end of the run until SIGINT or SIGTERM, in place of ending with it.
    finished_grace_s
        Seconds to wait at the end until watchers have been told.
    signals
        SIGINT and SIGTERM stop the run after the round at hand; a second one, at once.
    track
        Trackers beside those of the experiment.
    report
        Write the report at the end; else ``fedloom report`` can, later.
    """

    out: Path | None = None
    resume: bool = False
    replay: Path | None = None
    partition: str | None = None
    data: tuple[Path, ...] = ()
    observe: tuple[Path, ...] = ()
    publish: str | None = None
    name: str | None = None
    listen: str | None = None
    protection: ServerOptions | None = None
    audit: Path | None = None
    wait_s: float = 60.0
    orphan_after_s: float | None = None
    health: str | None = None
    metrics: str | None = None
    stay: bool = False
    finished_grace_s: float = 5.0
    signals: bool = False
    report: bool = True
    track: tuple[str, ...] = ()

    @property
    def serves(self) -> list[str]:
        """How ``fedloom worker`` is told of the packed clients."""
        given = [*(("--data", folder) for folder in self.data), *(("--observe", folder) for folder in self.observe)]
        return [word for option, folder in given for word in (option, str(folder))]
