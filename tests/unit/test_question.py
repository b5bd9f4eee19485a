"""Question that members of a secure sum were asked: what it depends on, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import refusing
from federations import setup
from lying_aggregator import Ask, Measure, ToldApart

from fedloom.algorithms.base import available, find_algorithm
from fedloom.data.spec import Normalization
from fedloom.engine.assemble import answers_digest
from fedloom.engine.run_data import open_manifest
from fedloom.errors import ExperimentError
from fedloom.experiment import Experiment, load_experiment
from fedloom.messages import Message
from fedloom.sums.messages import Question, combined_digest, digest_of_tensors

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
        return answers_digest(e, open_manifest(e, e.data.own, Normalization((0.0,) * 3, (1.0,) * 3)))  # type: ignore[union-attr]

    assert (digest(experiment(tmp_path)) != digest(experiment(tmp_path, override))) == shapes


def test_the_digest_of_a_run_has_the_normalization(tmp_path: Path) -> None:
    e: Any = experiment(tmp_path)
    digests = {
        answers_digest(e, open_manifest(e, e.data.own, Normalization((mean,) * 3, (1.0,) * 3))) for mean in (0, 1)
    }
    assert len(digests) == 2


def test_clients_with_their_own_data_need_a_bound_on_examples(tmp_path: Path) -> None:
    """The aggregator would have to be believed: members do not know each other's sizes."""
    with refusing(ExperimentError, "federation.secure_aggregation.examples", "weighting"):
        experiment(tmp_path, "federation.secure_aggregation.examples=null")
    experiment(tmp_path, "federation.secure_aggregation.examples=null", "algorithm.weighting=uniform")
