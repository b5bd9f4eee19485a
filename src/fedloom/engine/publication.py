"""Publication of a run to a store, with checks before the run begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedloom.core.urls import is_url
from fedloom.engine.options import RunOptions
from fedloom.errors import ExperimentError, FedloomError, QuorumError, argument
from fedloom.experiment import Experiment
from fedloom.runs.folder import RunFolder
from fedloom.runs.published import Publisher
from fedloom.storage import Store, open_store

log = logging.getLogger("fedloom.run")

RECORD = "published.json"
"""File in a run's folder with the URL at which the run is published."""


class Publication:
    """Publication of a run; without a ``url``, the run stays in its folder and nothing is published.

    Raise ExperimentError if the place to publish at is not a store.
    """

    def __init__(self, folder: RunFolder, e: Experiment, options: RunOptions) -> None:
        self._folder = folder
        self._resume = options.resume
        self.url = _url(folder, e, options)
        self._store: Store | None = None
        self._published: Publisher | None = None

    def connect(self) -> None:
        """Check access to the store.

        Raise ExperimentError if it holds a run already, and this is not a resume. Raise StorageError or RefusedError if
        the store cannot be used.
        """
        if self.url is None:
            return
        self._store = open_store(self.url)
        self._store.check()
        if not self._resume and any(self._store.entries("published/")):
            raise ExperimentError(
                f"{self.url} already holds a run.",
                hint=f"continue with {argument('resume')}, or choose another URL ({argument('publish')})",
                key="publish",
                found=self.url,
            )

    def restore(self, incarnation: str, check: Callable[[RunFolder, str | None], None]) -> bool:
        """Begin to publish; on resume, download the published run if it is ahead. Return whether there is one."""
        if self._store is None:
            return False
        self._published = Publisher(self._folder, self._store, incarnation)
        return self._resume and self._published.restore(lambda path: check(RunFolder(path), self.url))

    @property
    def publish(self) -> Callable[[int], None] | None:
        """Function that publishes a durable round."""
        return None if self._published is None else self._published.publish

    @property
    def keep_release(self) -> Callable[[Mapping[str, Any]], None] | None:
        """Function that stores a private release before it is sent."""
        return None if self._published is None else self._published.keep_release

    @property
    def is_whole(self) -> bool:
        """True unless some files of a finished run are unpublished."""
        return self._published is None or self._published.finished

    def note(self, *, finished: bool = False) -> None:
        """Record the URL, if any, in the run's folder; an earlier one is replaced."""
        if self.url is None:
            self._folder.remove(RECORD)
        else:
            self._folder.write_json(RECORD, {"url": self.url, **({"finished": True} if finished else {})})

    def gather_releases(self) -> None:
        """Download releases from the store: the previous aggregator may have asked clients after this one took over."""
        if self._published is not None:
            self._published.gather_releases()

    def finish(self) -> None:
        """Publish the results of a finished run."""
        if self._published is not None:
            self._published.finish()
            self.note(finished=True)

    def complete(self) -> None:
        """Publish the files of a finished run that an earlier process left unpublished."""
        if self._published is not None:
            if not self.is_whole:
                self.note()
                self._published.finish()
            self.note(finished=True)

    @contextmanager
    def logs_kept(self) -> Iterator[None]:
        """Publish the logs of a failing run, which its user may not be able to read otherwise.

        Raise StorageError in place of a round's error if another aggregator has continued the run.
        """
        try:
            with self._fenced():
                yield
        except FedloomError as error:
            log.error("%s", error)
            if self._published is not None:
                try:
                    self._published.log_files()
                except FedloomError as another:
                    log.warning("cannot publish the logs: %s", another)
            raise

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        try:
            yield
        except QuorumError:
            if self._published is not None:
                self._published.check_newest()
            raise


def _url(folder: RunFolder, e: Experiment, options: RunOptions) -> str | None:
    if options.publish is not None:
        if not is_url(options.publish):
            raise ExperimentError(
                f"{argument('publish')} must be a store, such as s3://BUCKET/PREFIX (got {options.publish}).",
                key="publish",
                found=options.publish,
            )
        return options.publish.rstrip("/")
    if e.storage is not None and is_url(e.storage):
        return f"{e.storage.rstrip('/')}/runs/{options.name or folder.path.resolve().name}"
    return None
