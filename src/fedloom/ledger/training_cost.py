"""Privacy cost of a training for a client that took part, read from a run or from the claim in its ``summary.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedloom.core import digests
from fedloom.core.urls import is_url
from fedloom.core.words import DEEPEST, first_of, parsed_json, printable
from fedloom.data.folders import text_fault
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.federation.releases import count_releases_about
from fedloom.privacy.accounting import EVERYONE
from fedloom.privacy.spent import TrainingCost, released
from fedloom.runs.files import SUMMARY
from fedloom.runs.folder import RunFolder

LONGEST = 16 * 2**20
"""Maximum characters of a summary, which others may have written."""


@dataclass(frozen=True)
class ClaimedTraining:
    """Cost of a training as a run claims it.

    Attributes
    ----------
    run
        Name of the run.
    digest
        Digest of its summary, by which a ledger counts it once.
    cost
        Its cost.
    """

    run: str
    digest: str
    cost: TrainingCost


def training_claimed(source: str, client: str | None = None) -> ClaimedTraining:
    """Return the cost of a training for a client, from the folder or URL of the run, or from its ``summary.json``.

    A summary has the mechanism only if it is the same for every client. From a folder or URL, the noisy steps of
    ``client``, by its id in the run, are counted.

    Raise DataError if there is no such run, it is not finished, or its summary is damaged or was not written by
    FedLoom; ExperimentError if the training protects no example: it was not private, had no ε, or took its noise from a
    seed.
    """
    is_folder = is_url(source) or Path(source).is_dir()
    folder = RunFolder.open(source, checkpoints=False) if is_folder else None
    if folder is not None and not folder.is_finished:
        raise DataError(
            f"{source} is not finished; its training has no final ε yet.", hint="count it when it has ended"
        )
    path = Path(source) if folder is None else folder.path / SUMMARY
    text = _text(path)
    summary = _summary(path, text)
    claim = summary.get("training_privacy")
    name = printable(str(summary.get("name", path.name)), 200)
    _check(claim, source)
    try:
        cost = TrainingCost.model_validate(claim)
    except ValidationError as error:
        raise DataError(f"{path}: training_privacy was not written by FedLoom: {text_fault(error)}") from None
    if folder is not None and client is not None and cost.unit == "examples":
        cost = TrainingCost.model_validate({**cost.model_dump(), "releases": _own(folder, client)})
    return ClaimedTraining(name, digests.short_digest(text.encode()), cost)


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "it is not text"
        raise DataError(
            f"{argument('training')}: {path} cannot be read: {reason}", hint="give a run's folder, or its summary.json"
        ) from error
    if len(text) > LONGEST:
        raise DataError(f"{path} has {len(text):,} characters; the limit is {LONGEST:,}")
    return text


def _summary(path: Path, text: str) -> Mapping[str, Any]:
    try:
        document = parsed_json(digests.without_digest(SUMMARY, text.encode()), DEEPEST)
        if isinstance(document, dict):
            return document
    except ValueError as error:  # also digests.Damaged
        raise DataError(f"{path} is damaged: {error}", hint="obtain the file again") from None
    raise DataError(f"{path} must hold a JSON object, and holds a {type(document).__name__}.")


def _check(claim: Any, source: str) -> None:
    """Raise ExperimentError if the ε of a training protects nobody, or there is none."""
    if isinstance(claim, dict) and claim.get("epsilon") is not None and claim.get("noise") != "seed":
        return
    if not isinstance(claim, dict):
        reason = "was not private: it has no training_privacy in its summary"
    elif claim.get("epsilon") is None:
        reason = "claims no ε"
    else:
        reason = "took its noise from the experiment's seed, as a simulation does, so it protects nobody"
    raise ExperimentError(
        f"The training of {source} {reason}, so a client that took part has no finite total ε.",
        key="training",
        found=source,
    )


def _own(folder: RunFolder, client: str) -> list[dict[str, Any]]:
    """Return the releases of training about the examples of one client; none if it was never asked."""
    counts = count_releases_about(folder, "examples").counts
    if client not in counts and not any(each.id == client and each.seen for each in folder.manifest().clients):
        clients = sorted(set(counts) - {EVERYONE})
        raise ExperimentError(
            f"{argument('client')} must be one that took noisy steps in {folder.path}: {first_of(clients, 20)} (got "
            f"{client!r}).",
            key="client",
            found=client,
        )
    return released(counts.get(client, Counter()) + counts.get(EVERYONE, Counter()))
