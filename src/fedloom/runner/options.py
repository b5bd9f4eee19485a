"""Execution options of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedloom.runner.observer import RunObserver
from fedloom.security.options import ServerOptions


@dataclass(frozen=True)
class RunOptions:
    """Execution options of a run; none of them changes a result.

    Attributes
    ----------
    out, resume, replay, partition, data, observe, publish, report, track
        Arguments of :func:`fedloom.run`, which describes them; ``data`` is ``packed`` there.
    name
        Name of the published run; None: the folder's name.
    listen
        ``host:port`` to listen on for workers; None: the run starts its own workers.
    protection
        Protection of a listening aggregator; None: none, and it serves this machine only.
    audit
        Path of the audit log; None: ``logs/audit.jsonl`` in the run's folder.
    wait_s
        Seconds until external workers must serve every client; the run's own workers are waited for as long as they
        run.
    orphan_after_s
        Seconds without a watcher after which the run stops; None: never.
    health
        ``host:port`` for health probes in plaintext, and nothing else; None: none.
    metrics
        ``host:port`` for Prometheus; None: none.
    stay
        Keep serving the end of the run until SIGINT or SIGTERM instead of exiting.
    finished_grace_s
        Seconds to wait at the end for watchers to read it.
    signals
        Stop after the current round on SIGINT or SIGTERM; a second signal stops at once.
    watcher
        Another observer of rounds and evaluations, called after the observer and the trackers. An error that it raises
        ends the run; a search stops a trial in this way.
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
    watcher: RunObserver | None = None

    @property
    def serves(self) -> list[str]:
        """Options that give ``fedloom worker`` the packed clients."""
        given = [*(("--data", folder) for folder in self.data), *(("--observe", folder) for folder in self.observe)]
        return [word for option, folder in given for word in (option, str(folder))]
