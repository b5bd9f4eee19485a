"""A worker's own models: each client's personalized model of the last and of the best evaluated round, as files."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.files import storing, write_atomically
from fedloom.core.words import DEEPEST, parsed_json
from fedloom.data.federated import ClientData
from fedloom.engine.assemble import RunContext
from fedloom.errors import ExperimentError, FedloomError, argument
from fedloom.federation.standing import Standing
from fedloom.models.predictors import Predictor, Predictors
from fedloom.serving.personal_model import FORMATS, PersonalModel, card_of
from fedloom.serving.serve import problem_of

_log = logging.getLogger(__name__)

RUN, ROUNDS = "run.json", "rounds.json"
"""File that names the run whose models a folder holds, and a client's file with the rounds of its models."""


class KeptModels:
    """Folder of a worker's models: in ``FOLDER/CLIENT``, ``last`` and ``best`` in a format of ``fedloom personalize``.

    An evaluation computes each client's model anyhow; it is written before its results are sent. The best round is the
    federation's, as the aggregator tells it (:class:`Standing`). A worker that missed that evaluation keeps the best
    model that it has. ``rounds.json`` and each model's card name the rounds.

    Parameters
    ----------
    folder
        Folder of this run's models; an earlier process of the same run may have written some.
    form
        Suffix of a format of :meth:`PersonalModel.save`.

    Raise ExperimentError if the format is unknown.
    """

    def __init__(self, folder: Path, form: str) -> None:
        if form not in FORMATS:
            raise ExperimentError(
                f"model_format must be one of {', '.join(FORMATS)} (got {form!r}).",
                key="model_format",
                found=form,
                allowed=FORMATS,
            )
        self._folder, self._form = folder, form
        self._parts: RunContext | None = None
        self._lock = threading.Lock()
        self._rounds: dict[str, dict[str, int]] = {}  # by client: the rounds of its models "last" and "best"
        self._files: dict[str, list[Path]] = {}  # by client: the files of its last model
        self._best_round: int | None = None
        self._failed: FedloomError | None = None

    def begin(self, parts: RunContext) -> None:
        """Begin a run, or continue it.

        Raise ExperimentError if the folder holds the models of another run; StorageError if it cannot be written.
        """
        run = {"run": parts.experiment.name, "algorithm": parts.algorithm.name}
        with storing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        recorded = _recorded(self._folder / RUN)
        if recorded not in (None, run):
            raise ExperimentError(
                f"{argument('out')} must be a new folder, or one of run {run['run']} with {run['algorithm']}; "
                f"{self._folder} holds the models of {recorded}.",
                key="out",
                found=str(self._folder),
            )
        _record(self._folder / RUN, run)
        self._parts = parts

    def keep(self, round: int, clients: Sequence[ClientData], models: Predictors) -> None:
        """Write the models of a group of clients after a round; an error is logged, and raised by :meth:`end`."""
        with self._lock:
            for client, named in zip(clients, models, strict=True):
                if named:
                    self._try(client.id, lambda: self._keep(client.id, round, named))  # noqa: B023

    def told(self, standing: Standing) -> None:
        """Take note of the best round. May be called from any thread."""
        with self._lock:
            if standing.best_round != self._best_round:
                self._best_round = standing.best_round
                for client, files in self._files.items():
                    rounds = self._rounds[client]
                    if rounds["last"] == self._best_round != rounds["best"]:
                        self._try(client, lambda: self._keep_best(client, files))  # noqa: B023

    def end(self) -> None:
        """Log where each client's models are; raise the error of a model that was not kept."""
        with self._lock:
            for client, rounds in sorted(self._rounds.items()):
                text = "client %s: its models of rounds %d (last) and %d (best) are in %s"
                folder = self._folder / client
                data = {"event": "models", "folder": str(folder), **rounds}
                _log.info(text, client, rounds["last"], rounds["best"], folder, extra={"client": client, "data": data})
            if self._failed is not None:
                raise self._failed

    def _try(self, client: str, write: Any) -> None:
        try:
            write()
        except FedloomError as error:
            _log.error("client %s: its model is not kept: %s", client, error, extra={"client": client})
            self._failed = error

    def _keep(self, client: str, round: int, named: Mapping[str, Predictor]) -> None:
        folder, parts = self._folder / client, self._parts
        assert parts is not None
        name = "personal" if "personal" in named else next(iter(named))
        card = card_of(
            problem_of(parts),
            run=parts.experiment.name,
            round=round,
            digest="",
            algorithm=parts.algorithm.name,
            predictor=name,
            model=parts.experiment.model.name,
            client=client,
            standardizes=parts.standardizes,
        )
        with storing(folder):
            folder.mkdir(exist_ok=True)
        files = PersonalModel(named[name], card).cpu().save(folder / f"last{self._form}")
        rounds = self._rounds.get(client) or _recorded(folder / ROUNDS) or {}
        self._rounds[client], self._files[client] = {"best": round, **rounds, "last": round}, files
        if "best" in rounds:
            _record(folder / ROUNDS, self._rounds[client])
        else:
            self._keep_best(client, files)

    def _keep_best(self, client: str, files: Sequence[Path]) -> None:
        """Make a client's last model its best one, by links: the next last model replaces its files."""
        folder = self._folder / client
        for path in files:
            best = folder / str(path.relative_to(folder)).replace("last.", "best.", 1)
            if path.suffix == ".md" and path.parent == folder:
                write_atomically(best, path.read_bytes().replace(b"last.", b"best."))
                continue
            partial = best.with_name(f".{best.name}.partial")
            with storing(best):
                best.parent.mkdir(exist_ok=True)
                partial.unlink(missing_ok=True)
                try:
                    os.link(path, partial)
                except OSError:  # a file system without links
                    shutil.copyfile(path, partial)
                partial.replace(best)
        self._rounds[client]["best"] = self._rounds[client]["last"]
        _record(folder / ROUNDS, self._rounds[client])


def _recorded(path: Path) -> Any:
    """Return the content of a file of JSON; None if there is none.

    Raise ExperimentError if it is not JSON.
    """
    with storing(path, "read"):
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    try:
        return None if text is None else parsed_json(text, DEEPEST)
    except ValueError as error:
        raise ExperimentError(f"{path} is damaged: {error}; give a new folder with {argument('out')}.") from error


def _record(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, f"{json.dumps(content)}\n".encode())
