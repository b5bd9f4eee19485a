"""Questions that members of secure sums were asked, and refusals of a question over another set of clients."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import mentions, refusing
from federations import setup
from lying_aggregator import Ask, Measure, ToldApart

import fedloom
from fedloom.algorithms.base import available, find_algorithm
from fedloom.data.spec import Normalization
from fedloom.engine.assemble import answers_digest
from fedloom.engine.run_data import open_manifest
from fedloom.errors import DataError, ExperimentError, RefusedError, StorageError
from fedloom.experiment import Experiment, load_experiment
from fedloom.messages import Message
from fedloom.sums.messages import Question, combined_digest, digest_of_tensors
from fedloom.sums.revealed_sums import RECORD, RevealedSums, Subject


def subject(round: int) -> Subject:
    """Return the subject of a round."""
    return Subject(round, combined_digest(round))


SUBJECT, LASTING = subject(4), Subject(None, combined_digest("Moments"))
SUM, OTHER = combined_digest("a", "b", "c", "d"), combined_digest("a", "e", "f", "g")


def test_an_equal_sum_may_be_revealed_again_and_no_other() -> None:
    sums = RevealedSums()
    for _ in range(3):
        sums.check("a", SUBJECT, SUM)
        with refusing(RefusedError, "a", 4):
            sums.check("a", SUBJECT, OTHER)
    sums.check("a", subject(5), OTHER)  # another question
    sums.check("b", SUBJECT, OTHER)  # another client, which has revealed nothing


def test_nothing_is_forgotten() -> None:
    sums = RevealedSums()
    for round in range(20_000):
        sums.check("a", subject(round), SUM)
    for round in (0, 10_000, 19_999):
        with refusing(RefusedError, "a", round):
            sums.check("a", subject(round), OTHER)


# --- the record on disk -----------------------------------------------------------------------------------------------


def checked(folder: Path) -> RevealedSums:
    """Reveal sums of a round for two clients, and one of lasting answers."""
    sums = RevealedSums(folder)
    for client in ("a", "b"):
        sums.check(client, SUBJECT, SUM)
    sums.check("a", LASTING, SUM)
    return sums


def remembers(sums: RevealedSums) -> bool:
    """Return True if exactly these sums are recorded."""
    for client, asked in (("a", SUBJECT), ("b", SUBJECT), ("a", LASTING)):
        with refusing(RefusedError, client):
            sums.check(client, asked, OTHER)
        sums.check(client, asked, SUM)
    return True


def test_another_process_reads_the_record(tmp_path: Path) -> None:
    checked(tmp_path)
    assert remembers(RevealedSums(tmp_path))
    assert (tmp_path / RECORD).stat().st_mode & 0o777 == 0o600


def test_concurrent_processes_share_the_record(tmp_path: Path) -> None:
    first, second = RevealedSums(tmp_path), RevealedSums(tmp_path)
    first.check("a", SUBJECT, SUM)
    with refusing(RefusedError, "a"):
        second.check("a", SUBJECT, OTHER)
    second.check("a", subject(5), OTHER)
    with refusing(RefusedError, "a"):
        first.check("a", subject(5), SUM)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_killed_process_has_recorded_all_that_it_allowed(tmp_path: Path) -> None:
    code = f"""
import os, signal, pathlib
from fedloom.sums.messages import combined_digest
from fedloom.sums.revealed_sums import RevealedSums, Subject
sums = RevealedSums(pathlib.Path({str(tmp_path)!r}))
for round in range(1, 9):
    sums.check("a", Subject(round, combined_digest(round)), combined_digest("sum"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    sums = RevealedSums(tmp_path)
    for round in range(1, 9):
        with refusing(RefusedError, "a", round):
            sums.check("a", subject(round), OTHER)


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_truncated_last_line_is_ignored(tmp_path: Path, kept: int) -> None:
    checked(tmp_path)
    whole = (tmp_path / RECORD).read_bytes()
    RevealedSums(tmp_path).check("c", SUBJECT, SUM)
    line = (tmp_path / RECORD).read_bytes()[len(whole) :]
    (tmp_path / RECORD).write_bytes(whole + line[:kept])
    sums = RevealedSums(tmp_path)
    assert (tmp_path / RECORD).read_bytes() == whole
    sums.check("c", SUBJECT, OTHER)
    assert remembers(RevealedSums(tmp_path))


def test_a_line_truncated_by_another_process_is_removed(tmp_path: Path) -> None:
    """A full disk has truncated a line of another process."""
    sums = checked(tmp_path)
    with (tmp_path / RECORD).open("ab") as file:
        file.write(b'{"version": 2, "rou')
    sums.check("c", SUBJECT, SUM)
    assert remembers(RevealedSums(tmp_path))


@pytest.mark.parametrize("at", range(5, 700, 50))
def test_a_damaged_record_is_rejected(tmp_path: Path, at: int) -> None:
    sums = checked(tmp_path)
    record = tmp_path / RECORD
    content = bytearray(record.read_bytes())
    content[at % len(content)] ^= 1
    record.write_bytes(content)
    with refusing(DataError, RECORD) as error:
        RevealedSums(tmp_path)
    assert mentions(str(error.value.hint), "copy", "remove")
    if at % len(content) < len(content) - 60:
        sums.check("a", SUBJECT, SUM)  # sums read earlier are kept


def test_removed_lines_are_detected(tmp_path: Path) -> None:
    sums = checked(tmp_path)
    lines = (tmp_path / RECORD).read_bytes().splitlines(keepends=True)
    (tmp_path / RECORD).write_bytes(b"".join(lines[1:]))
    with refusing(DataError, RECORD):
        RevealedSums(tmp_path)
    with refusing(RefusedError, "a") as error:  # reveals nothing of this machine to the aggregator
        sums.check("a", SUBJECT, SUM)
    assert str(tmp_path) not in str(error.value)


def test_a_record_of_another_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("fedloom.sums.revealed_sums.VERSION", 3)
        checked(tmp_path)
    with refusing(DataError, RECORD, 2, 3):
        RevealedSums(tmp_path)


def test_an_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    with refusing(StorageError, tmp_path):
        RevealedSums(tmp_path / "missing")


OWN = """
name: sites
data: {own: {kind: features, input_shape: [3], classes: [a, b], normalization: {mean: [0, 0, 0], std: [1, 1, 1]}}}
model: {name: mlp, hidden: [4]}
algorithm: {name: fedavg, local: {epochs: 1, lr: 0.1}}
federation: {rounds: 2, clients_per_round: 3, min_clients: 3, secure_aggregation: {signatures: none, examples: 100}}
"""


def asked(*messages: Message) -> bytes:
    """Return the digest of a conversation."""
    question = Question()
    for message in messages:
        question = question.then(Question.from_message(message))
    return question.digest


def test_a_question_depends_on_every_broadcast_and_their_order() -> None:
    theta = torch.tensor([1.0, 2.0, 3.0])
    different = [
        asked(Ask(theta)),
        asked(Measure(theta)),
        asked(Ask(theta.double())),
        asked(Ask(theta[None])),
        asked(Ask(torch.nextafter(theta, theta + 1))),
        asked(Ask(theta[:2])),
        asked(Ask(theta), Ask(theta)),
        asked(Ask(theta), Measure(theta)),
        asked(Measure(theta), Ask(theta)),
    ]
    assert len(set(different)) == len(different)
    assert asked(Ask(theta.clone())) == asked(Ask(torch.stack([theta, theta], 1)[:, 0]))


def test_values_for_single_clients_make_a_question_that_is_not_shared() -> None:
    theta = torch.ones(2, 3)
    question = Question.from_message(ToldApart(theta))
    assert not question.is_shared
    assert not Question.from_message(Ask(theta)).then(question).is_shared
    assert question.digest == Question.from_message(ToldApart(2 * theta)).digest


def test_digests_of_sequences_are_unambiguous() -> None:
    assert combined_digest("a", "b") != combined_digest("ab")
    assert combined_digest(1) != combined_digest("1")
    assert combined_digest(b"a", b"") != combined_digest(b"a")
    first, second = torch.zeros(2), torch.zeros(3)
    assert digest_of_tensors({"a": first, "b": second}) != digest_of_tensors({"a": second, "b": first})
    assert digest_of_tensors({}) != digest_of_tensors({"a": torch.zeros(0)})


@pytest.mark.parametrize("name", available())
def test_each_method_tells_training_from_personalization_by_the_opening(name: str) -> None:
    """A method whose personalization has several openings names them all."""
    method = find_algorithm(name)
    client = method.client(method.settings(), replace(setup(), roster=("c0", "c1", "c2")))
    openings = type(client)._openings()
    assert {client.trains(opening) for opening in openings} == ({False, True} if method.trains else {False})
    assert not any(
        client.trains(opening) for opening, called in openings.items() if called in ("personalize", "search")
    )


def experiment(tmp_path: Path, *overrides: str) -> Experiment:
    """Return an experiment whose clients bring their own data."""
    (tmp_path / "sites.yaml").write_text(OWN)
    return load_experiment(tmp_path / "sites.yaml", list(overrides))


@pytest.mark.parametrize(
    ("override", "shapes"),
    [
        ("algorithm.local.lr=1e-30", True),
        ("federation.secure_aggregation.range=1e30", True),
        ("federation.secure_aggregation.examples=1000000", True),
        ("federation.clients_per_round=4", True),
        ("seed=3", True),
        ("model.hidden=[5]", True),
        ("evaluation.label_mask=true", True),
        ("name=other", False),
        ("federation.rounds=9", False),
        ("federation.deadline_s=9", False),
        ("federation.min_clients=4", False),
    ],
)
def test_the_digest_of_a_run_has_all_that_shapes_an_answer(tmp_path: Path, override: str, shapes: bool) -> None:
    def digest(e: Experiment) -> bytes:
        return answers_digest(e, open_manifest(e, e.data.own, Normalization((0.0,) * 3, (1.0,) * 3)), 1)  # type: ignore[union-attr]

    assert (digest(experiment(tmp_path)) != digest(experiment(tmp_path, override))) == shapes


def test_the_digest_of_a_run_has_the_normalization(tmp_path: Path) -> None:
    e: Any = experiment(tmp_path)
    digests = {
        answers_digest(e, open_manifest(e, e.data.own, Normalization((mean,) * 3, (1.0,) * 3)), 1) for mean in (0, 1)
    }
    assert len(digests) == 2


def test_the_digest_of_a_run_has_the_version_of_the_method_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases with the same version of the method can be in one sum, and no others."""
    e: Any = experiment(tmp_path)
    manifest = open_manifest(e, e.data.own, Normalization((0.0,) * 3, (1.0,) * 3))
    digests = [answers_digest(e, manifest, version) for version in (1, 2, 3)]
    assert len(set(digests)) == 3
    monkeypatch.setattr(fedloom, "__version__", "9.9")
    assert [answers_digest(e, manifest, version) for version in (1, 2, 3)] == digests


def test_clients_with_their_own_data_need_a_bound_on_examples(tmp_path: Path) -> None:
    """The aggregator would have to be believed: members do not know each other's sizes."""
    with refusing(ExperimentError, "federation.secure_aggregation.examples", "weighting"):
        experiment(tmp_path, "federation.secure_aggregation.examples=null")
    experiment(tmp_path, "federation.secure_aggregation.examples=null", "algorithm.weighting=uniform")
