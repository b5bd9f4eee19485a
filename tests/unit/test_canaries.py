"""Canaries: partitions with them, their updates, guesses, and bounds that a known mechanism keeps or violates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from vowel_data import vowel_root

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import SharedModel, Update
from fedloom.attacks.canary_algorithms import CanaryClientAlgorithm, CanarySet, sent_part, sent_size
from fedloom.attacks.canary_data import (
    COPIED,
    canary_names,
    canary_targets,
    draw_examples,
    write_with_clients,
    write_with_examples,
)
from fedloom.attacks.canary_evidence import canary_document, guess_counts, normal_estimate, right_guesses
from fedloom.core.keyed import make_rng
from fedloom.data.assignment import PartitionSettings
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.partition import partition_dataset
from fedloom.data.schemes import NaturalScheme
from fedloom.errors import ExperimentError
from fedloom.models.networks import MLP
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon

# --- guesses ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000))
def test_guess_counts_are_balanced_and_large_enough(canaries: int) -> None:
    for ins, outs in guess_counts(canaries):
        assert 8 <= ins + outs <= canaries
        assert ins == outs or outs - ins == 1 or outs == 0


def test_guesses_use_both_ends_of_the_scores() -> None:
    scores = np.array([5.0, 4, 3, 2, 1, 0])
    coins = np.array([True, False, True, False, True, False])
    assert right_guesses(scores, coins, 2, 0) == 1
    assert right_guesses(scores, coins, 3, 1) == 3
    assert right_guesses(scores, coins, 0, 2) == 1
    assert right_guesses(scores, coins, 3, 3) == 4


def test_perfect_scores_give_the_largest_bound() -> None:
    coins = np.arange(400) % 2 == 0
    found = canary_document(coins.astype(float), coins, delta=1e-6, confidence=0.95)
    assert found["epsilon"] == found["largest_bound"] > 4
    assert found["right"] == found["guesses_in"] + found["guesses_out"] == 400


def test_the_estimate_needs_two_canaries_of_each_kind() -> None:
    scores = np.array([1.0, 2.0, 3.0])
    assert normal_estimate(scores, np.array([True, False, False]), delta=1e-5, confidence=0.95) is None


# --- a mechanism of known ε ------------------------------------------------------------------------------------------


def noisy_sum(seed: int, multiplier: float, *, canaries: int, size: int, rounds: int) -> tuple[Any, Any]:
    """Return scores and coins of canaries in sums of clipped updates with Gaussian noise, beside honest ones."""
    random = np.random.default_rng(seed)
    coins = random.random(canaries) < 0.5
    members = CanarySet(tuple(map(str, range(canaries))), coins, seed, 1.0)
    change = torch.zeros(size)
    reported = sum((members.direction(i, size) for i in range(canaries) if coins[i]), torch.zeros(size))
    for _ in range(rounds):
        honest = torch.from_numpy(random.standard_normal((10, size))).float()
        honest = honest / honest.norm(dim=1, keepdim=True)
        noise = multiplier * torch.from_numpy(random.standard_normal(size)).float()
        change += reported + honest.sum(0) + noise
    return members.scores(change), coins


@pytest.mark.slow
def test_the_bound_is_below_the_claim_with_noise_and_above_without() -> None:
    delta, rounds, multiplier = 1e-5, 4, 3.0
    claim = gaussian_epsilon(multiplier, delta, rounds)
    settings = {"canaries": 400, "size": 4000, "rounds": rounds}
    bounds, estimates = [], []
    for seed in range(10):
        scores, coins = noisy_sum(seed, multiplier, **settings)
        bounds.append(canary_document(scores, coins, delta=delta, confidence=0.95)["epsilon"])
        estimate = normal_estimate(scores, coins, delta=delta, confidence=0.95)
        estimates.append(estimate["epsilon"])
    assert max(bounds) <= claim
    assert np.mean(bounds) > 0.1 * claim  # it detects something
    assert np.mean(estimates) == pytest.approx(claim, rel=0.1)
    for seed in range(3):
        scores, coins = noisy_sum(seed, 0.0, **settings)
        assert canary_document(scores, coins, delta=delta, confidence=0.95)["epsilon"] > claim


# --- partitions -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vowels(tmp_path_factory: pytest.TempPathFactory) -> FederatedDataset:
    root = vowel_root(tmp_path_factory.mktemp("vowels"))
    folder = partition_dataset("vowel", PartitionSettings(NaturalScheme(scheme="natural"), 1, 0.2, 0.2), root=root)
    return FederatedDataset.open(folder)


def test_canary_clients_hold_copies_and_are_in_no_result(vowels: FederatedDataset, tmp_path: Path) -> None:
    names = canary_names(vowels, 12)
    write_with_clients(vowels, tmp_path, names, 7)
    found = FederatedDataset.open(tmp_path)
    found.verify()
    assert found.manifest.roster == (*vowels.manifest.roster, *names)
    assert found.manifest.unseen == vowels.manifest.unseen
    everything = torch.cat([vowels.client(client).train.x for client in vowels.manifest.roster])  # type: ignore[arg-type]
    for name in names:
        data = found.client(name)
        assert 0 < len(data.train) <= COPIED
        assert len(data.validation) == len(data.test) == 0
        assert all((everything == x).all(1).any() for x in data.train.x)
    for client in vowels.manifest.clients:
        torch.testing.assert_close(found.client(client.id).train.x, vowels.client(client.id).train.x)
    with pytest.raises(ExperimentError):
        canary_names(found, 12)


def test_canary_examples_have_a_wrong_target_or_are_absent(vowels: FederatedDataset, tmp_path: Path) -> None:
    canaries = draw_examples(vowels, 60, 3)
    assert len({(canary.client, canary.place) for canary in canaries}) == 60
    coins = make_rng(1, "coins").random(60) < 0.5
    write_with_examples(vowels, tmp_path, canaries, coins)
    found = FederatedDataset.open(tmp_path)
    found.verify()
    for client in vowels.manifest.clients:
        before, after = vowels.client(client.id).train, found.client(client.id).train
        mine = {canary.place: i for i, canary in enumerate(canaries) if canary.client == client.id}
        stays = [place for place in range(len(before)) if place not in mine or coins[mine[place]]]
        torch.testing.assert_close(after.x, before.x[stays])  # type: ignore[index]
        wrong = before.y.clone()
        for place, i in mine.items():
            assert canaries[i].target != int(before.y[place])
            wrong[place] = canaries[i].target
        assert torch.equal(after.y, wrong[stays])
        assert found.manifest.entry(client.id).train == len(stays)
        assert torch.equal(after.y, wrong[stays])
        torch.testing.assert_close(found.client(client.id).test.x, vowels.client(client.id).test.x)


def test_canaries_beyond_half_of_the_examples_are_rejected(vowels: FederatedDataset) -> None:
    with pytest.raises(ExperimentError):
        draw_examples(vowels, 10_000, 3)


def test_a_canary_of_another_task_takes_the_target_of_another_example(vowels: FederatedDataset) -> None:
    y = torch.tensor([0.5, 1.5, 2.5])
    canary = draw_examples(vowels, 1, 1)[0]
    some = [type(canary)("a", 0, 2), type(canary)("a", 1, 0)]
    assert canary_targets(y, some, 0).tolist() == [2.5, 0.5]
    assert canary_targets(torch.tensor([3, 4, 5]), some, 9).tolist() == [2, 0]


# --- updates of canaries ----------------------------------------------------------------------------------------------


def answers(method: str, canaries: CanarySet, client: str, round: int | None = 1) -> Any:
    algorithm, model = find_algorithm(method), MLP((4,), [3], 5)
    setup = Setup(model, classes=5, input_shape=(4,), clients=3, roster=("a", "b", "c"))
    split = Split(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5)
    inner = algorithm.client(algorithm.settings(), setup)
    group = ClientGroup(
        [ClientData(client, split, split, split, 5)], lambda _, __: torch.Generator().manual_seed(2), round=round
    )
    theta = model.init(torch.Generator().manual_seed(3))
    opening = SharedModel(theta)
    conversation = CanaryClientAlgorithm(inner, canaries).open(group, opening)
    answer = next(conversation)
    with pytest.raises(StopIteration):
        next(conversation)
    honest = next(inner.open(group, opening))
    return answer, honest


@pytest.mark.parametrize("norm", [None, 0.5])
def test_a_canary_sends_its_direction_and_other_clients_nothing(norm: float | None) -> None:
    canaries = CanarySet(("a", "b"), np.array([True, False]), 5, norm)
    answer, honest = answers("fedavg", canaries, "a")
    assert isinstance(answer, Update)
    size = answer.delta_theta.shape[1]
    expected = (norm or float(honest.delta_theta.norm())) * canaries.direction(0, size)
    torch.testing.assert_close(answer.delta_theta[0], expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(answer.steps, honest.steps)
    assert torch.equal(answers("fedavg", canaries, "b")[0].delta_theta, torch.zeros(1, size))
    other, unchanged = answers("fedavg", canaries, "c")
    torch.testing.assert_close(other.delta_theta, unchanged.delta_theta)


def test_directions_have_norm_1_and_are_nearly_orthogonal() -> None:
    canaries = CanarySet(("a", "b", "c"), np.array([True] * 3), 5, 1.0)
    rows = torch.stack([canaries.direction(i, 5000) for i in range(3)])
    torch.testing.assert_close(rows @ rows.T, torch.eye(3), atol=0.06, rtol=0)
    scores: NDArray[np.float64] = canaries.scores(2 * rows[0] + rows[2])
    np.testing.assert_allclose(scores, [2, 0, 1], atol=0.15)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "scaffold", "fedadam", "fedrep", "fedbabu", "lg-fedavg", "drfa", "afl", "ditto"]
)
def test_methods_with_one_shared_model_support_canaries(method: str) -> None:
    algorithm, model = find_algorithm(method), MLP((4,), [3], 5)
    setup = Setup(model, classes=5, input_shape=(4,), clients=3, roster=("a", "b", "c"))
    server = algorithm.server(algorithm.settings(), setup, torch.Generator().manual_seed(0))
    size = sent_size(server, algorithm)
    change: Tensor = torch.arange(len(server.state["theta"])).float()
    assert len(sent_part(change, size, algorithm, setup)) == size
    if method == "lg-fedavg":  # shares the head
        assert sent_part(change, size, algorithm, setup)[-1] == len(change) - 1


@pytest.mark.parametrize("method", ["local", "pfedhn", "heurfedamp"])
def test_methods_without_a_shared_model_reject_canaries(method: str) -> None:
    algorithm, model = find_algorithm(method), MLP((4,), [3], 5)
    setup = Setup(model, classes=5, input_shape=(4,), clients=3, roster=("a", "b", "c"))
    server = algorithm.server(algorithm.settings(), setup, torch.Generator().manual_seed(0))
    with pytest.raises(ExperimentError, match=method):
        sent_size(server, algorithm)
