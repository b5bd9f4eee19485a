"""WGA and Bias Correction against plain PyTorch (papers/004, Algorithms 1-3)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import Federation, clients, close, federation, group, mean_loss, setup
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms import collaboration
from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import LocalTrainer
from fedloom.algorithms.client_group import Batch
from fedloom.algorithms.collaboration import next_bias, weighted_gradient
from fedloom.algorithms.wga import (
    WGA,
    Gradients,
    SharedStates,
    TrueGradients,
    UserModel,
    WGAServer,
    WGASettings,
    gradient_of,
)
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.messages import answer_shapes
from fedloom.models.networks import Quadratic

SIZES = (9, 12, 7)
SEED = 7  # of the federations


def made(**keys: Any) -> WGASettings:
    return WGASettings.model_validate({"batch_size": 4, "lr": 0.05} | keys)


def problem(**keys: Any) -> Setup:
    return dataclasses.replace(setup(), roster=("c0", "c1", "c2"), **keys)


def run(folder: Path, s: WGASettings, data: list[ClientData] | None = None, **keys: Any) -> Federation:
    data = clients(SIZES) if data is None else data
    p = keys.pop("problem", problem())
    return federation(folder, WGA, s, dataclasses.replace(p, roster=tuple(c.id for c in data)), data, **keys)


def drawn(c: ClientData, s: WGASettings, round: int, steps: int = 1) -> list[Tensor]:
    random = generator(SEED, "train/train", c.id, round)
    return list(batches(len(c.train), s.batch_size, steps, random))


def at(p: Setup, theta: Tensor, c: ClientData, index: Tensor) -> Tensor:
    theta = theta.detach().clone().requires_grad_()
    loss = mean_loss(p.model.logits(theta, c.train.x[index]), c.train.y[index])
    return torch.autograd.grad(loss, [theta])[0]


@pytest.mark.usefixtures("each_task")
def test_bias_correction_follows_algorithm_3(tmp_path: Path) -> None:
    """Expect g = (1-α) g_0 + α (g_avg - c_t) with the earlier c_t; then c_{t+1} = (1-β) c_t + β (g_avg - g_0)."""
    s, data, p = made(alpha=0.7, beta=0.3), clients(SIZES), problem()
    fed = run(tmp_path, s, data, rounds=3)
    theta = fed.state["theta"][0]
    c = torch.zeros_like(theta)
    for t in (1, 2, 3):
        g = [at(p, theta, member, drawn(member, s, t)[0]) for member in data]
        average = (g[1] + g[2]) / 2
        theta = theta - 0.05 * (0.3 * g[0] + 0.7 * (average - c))
        c = 0.7 * c + 0.3 * (average - g[0])
    fed.run()
    close(fed.state["theta"][0], theta)
    close(fed.state["bias"][0], c)


def test_zero_helper_weight_equals_training_alone_exactly(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", made(rule="alone", steps_per_round=2), rounds=3)
    alone.run()
    for rule in ("wga", "bc", "oracle"):
        other = run(tmp_path / rule, made(rule=rule, alpha=0.0, steps_per_round=2), rounds=3)
        other.run()
        assert torch.equal(other.state["theta"], alone.state["theta"])


def test_an_exact_oracle_with_full_batches_equals_training_alone_for_any_alpha(tmp_path: Path) -> None:
    """Then g_avg minus the true bias is ∇f_0."""
    alone = run(tmp_path / "alone", made(rule="alone", batch_size=100), rounds=3)
    oracle = run(tmp_path / "oracle", made(rule="oracle", alpha=0.9, batch_size=100), rounds=3)
    noisy = run(tmp_path / "noisy", made(rule="oracle", alpha=0.9, batch_size=100, oracle_variance=1.0), rounds=3)
    for one in (alone, oracle, noisy):
        one.run()
    close(oracle.state["theta"], alone.state["theta"])
    assert not torch.allclose(noisy.state["theta"], alone.state["theta"])


@pytest.mark.parametrize("settings", [{}, {"weights": "cosine", "optimizer": "adam"}, {"weights": "inverse_variance"}])
def test_one_of_many_users_trains_like_the_only_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    one = run(tmp_path / "one", made(users="one", steps_per_round=2, **settings), rounds=3)
    all_ = run(tmp_path / "all", made(users="all", block=2, steps_per_round=2, **settings), rounds=3)
    one.run()
    all_.run()
    if settings.get("weights") == "inverse_variance":  # estimated at more states, so equal only at the start
        assert all_.state["variances"][:, 1].tolist() == one.state["variances"][:, 1].tolist() == [6.0] * 3
        whole = run(tmp_path / "whole", made(users="all", block=3, steps_per_round=2, **settings), rounds=3)
        whole.run()
        for name in ("theta", "variances"):  # clients in a later block are weighted as in an earlier one
            torch.testing.assert_close(whole.state[name], all_.state[name], rtol=1e-9, atol=1e-12)
        return
    assert torch.equal(one.state["theta"][0], all_.state["theta"][0])
    assert not torch.equal(all_.state["theta"][0], all_.state["theta"][1])


def test_each_user_has_a_separate_bias(tmp_path: Path) -> None:
    s, data, p = made(users="all", alpha=0.6, beta=1.0, block=2), clients(SIZES), problem()
    fed = run(tmp_path, s, data)
    start = fed.state["theta"]
    fed.run()
    for i in range(3):
        g = [at(p, start[i], c, drawn(c, s, 1)[0]) for c in data]
        average = sum(g[j] for j in range(3) if j != i) / 2
        close(fed.state["bias"][i], average - g[i])
        close(fed.state["theta"][i], start[i] - 0.05 * (0.4 * g[i] + 0.6 * average))


@pytest.mark.parametrize("lost", [0, 1])
def test_the_average_is_over_the_answering_helpers(tmp_path: Path, lost: int) -> None:
    s, data, p = made(rule="wga", alpha=0.5), clients(SIZES), problem()
    fed = run(tmp_path, s, data, lost={0: lost})
    theta = fed.state["theta"][0]
    g = [at(p, theta, c, drawn(c, s, 1)[0]) for c in data]
    fed.run()
    moved = theta - 0.05 * (0.5 * g[0] + 0.5 * g[2])
    close(fed.state["theta"][0], theta if lost == 0 else moved)  # without its own gradient user 0 makes no step
    (attempt,) = fed.loop.journal.counted()
    assert attempt.statistics["client_steps"] == 2
    assert attempt.statistics["users"] == (0 if lost == 0 else 1)


def test_another_user_zero_and_given_weights(tmp_path: Path) -> None:
    s, data, p = made(rule="wga", user="c1", alpha=0.5, weights={"c0": 3.0, "c2": 1.0}), clients(SIZES), problem()
    fed = run(tmp_path, s, data)
    theta = fed.state["theta"][0]
    g = [at(p, theta, c, drawn(c, s, 1)[0]) for c in data]
    fed.run()
    close(fed.state["theta"][0], theta - 0.05 * (0.5 * g[1] + 0.5 * (0.75 * g[0] + 0.25 * g[2])))
    for key, found in ({"user": "c9"}, "user"), ({"weights": {"nobody": 1.0}}, "weights"):
        with pytest.raises(ExperimentError, match=rf"^algorithm\.{found}: .*\bc0\b.*\bc2\b"):
            WGA.client(made(**key), problem())  # called by a run before it writes anything


def test_user_zero_is_in_every_cohort_and_the_rest_is_drawn(tmp_path: Path) -> None:
    fed = run(tmp_path, made(user="c1", batch_size=2), clients((4, 4, 4, 4, 4)), rounds=12)
    fed.loop._config = dataclasses.replace(fed.loop._config, clients_per_round=3)
    fed.run()
    cohorts = [attempt.conversations[0].clients for attempt in fed.loop.journal.counted()]
    assert all(len(cohort) == 3 and "c1" in cohort and cohort == sorted(cohort) for cohort in cohorts)
    assert {client for cohort in cohorts for client in cohort} == {f"c{i}" for i in range(5)}


def test_helpers_with_opposite_gradients_get_no_weight(tmp_path: Path) -> None:
    """Use a helper with user 0's data, and one with reversed labels."""
    (c0,) = clients((8,))
    assert c0.train.y is not None
    same = dataclasses.replace(c0, id="c1")
    model = Quadratic(2)
    x = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    data = [
        dataclasses.replace(same, id=f"c{i}", train=Split(factor * x, None))
        for i, factor in enumerate((1.0, 3.0, -2.0))
    ]
    server = WGAServer(made(rule="wga", weights="cosine"), problem(model=model), torch.Generator())
    gradients = torch.stack([-c.train.x.mean(0) for c in data])  # of ‖θ - x‖²/2 at θ = 0
    weights = server._weights(("c0", "c1", "c2"), gradients, torch.ones(3).bool(), server.state, 0)
    assert weights.tolist() == [0.0, 1.0, 0.0]
    none = server._weights(("c0", "c1", "c2"), -gradients[[0, 2, 2]], torch.ones(3).bool(), server.state, 0)
    assert not none.any()
    del tmp_path


def test_the_variance_of_a_gradient_is_estimated_without_bias() -> None:
    """Check batches of 5 out of many: (1/5) tr Cov H(θ - x) = (1/5) Σ h² s²."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(5_000, 2, generator=random, dtype=torch.float64) * torch.tensor([1.0, 3.0])
    c = dataclasses.replace(clients((4,))[0], train=Split(x, None))
    theta = torch.zeros(1, 2, dtype=torch.float64)
    h = torch.tensor([2.0, 1.0], dtype=torch.float64)
    local = LocalTrainer(Quadratic(2, (2.0, 1.0)), group([c]))
    drawn = [Batch(x[index], None, torch.full((5,), 0.2).double()) for index in torch.arange(5_000).split(5)]
    found = [gradient_of(local, theta, batch) for batch in drawn]
    expected = (4 * 1 + 1 * 9) / 5
    assert sum(variance.item() for _, _, variance in found) / len(found) == pytest.approx(expected, rel=0.1)
    close(found[0][0][0], -h * x[:5].mean(0))
    close(found[0][1][0, 0], (0.5 * h * x[:5].square()).sum(1).mean())


def test_helpers_are_weighted_by_their_inverse_variance(tmp_path: Path) -> None:
    server = WGAServer(made(rule="wga", weights="inverse_variance"), problem(), torch.Generator().manual_seed(0))
    state = server.state
    gradients, everyone = torch.zeros(3, 4), torch.ones(3).bool()
    assert server._weights(("c0", "c1", "c2"), gradients, everyone, state, 0).tolist() == [0, 0.5, 0.5]
    state["variances"][:] = torch.tensor([[9.0, 2], [2.0, 2], [12.0, 3]])
    assert server._weights(("c0", "c1", "c2"), gradients, everyone, state, 0).tolist() == pytest.approx([0, 0.8, 0.2])
    del tmp_path


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_corrected_gradient_is_passed_to_the_optimizer(tmp_path: Path, optimizer: str) -> None:
    s, data, p = made(rule="wga", alpha=0.5, optimizer=optimizer, lr=0.02), clients(SIZES), problem()
    fed = run(tmp_path, s, data, rounds=4)
    theta = fed.state["theta"][0].requires_grad_()
    reference: torch.optim.Optimizer = (
        torch.optim.SGD([theta], 0.02, momentum=0.9) if optimizer == "momentum" else torch.optim.Adam([theta], 0.02)
    )
    for t in (1, 2, 3, 4):
        g = [at(p, theta.detach(), c, drawn(c, s, t)[0]) for c in data]
        theta.grad = weighted_gradient(g[0], (g[1] + g[2]) / 2, 0.5)
        reference.step()
    fed.run()
    close(fed.state["theta"][0], theta.detach())


def test_schedules() -> None:
    s = made(alpha=(1.0, 0.5), beta="harmonic")
    assert [s.alpha_at(t, 4, 0.1) for t in range(4)] == [1.0, 0.5, 0.5, 0.5]
    c, seen = torch.zeros(()), torch.tensor([3.0, 5.0, 1.0])
    for t, b in enumerate(seen):
        c = next_bias(c, torch.zeros(()), b, s.beta_at(t, 4))
    close(c, seen.mean())  # with 1/(t + 1) the estimate is the mean of all observations


def test_a_harmonic_beta_counts_the_users_own_observations(tmp_path: Path) -> None:
    """Cohorts of two of three: a user whose first update is late must not keep a part of c_0 = 0."""
    s, data, p = made(users="all", alpha=0.0, beta="harmonic"), clients(SIZES), problem()
    fed = run(tmp_path, s, data, rounds=4, cohort=2)
    theta = fed.state["theta"].clone()
    fed.run()
    observed: list[list[Tensor]] = [[], [], []]
    for attempt in fed.loop.journal.counted():
        members = [int(id[1:]) for id in attempt.conversations[0].clients]
        for i in members:
            g = {j: at(p, theta[i], data[j], drawn(data[j], s, attempt.round)[0]) for j in members}
            observed[i].append(sum(g[j] for j in members if j != i) - g[i])
            theta[i] = theta[i] - 0.05 * g[i]
    assert min(map(len, observed)) < 4
    for i, seen in enumerate(observed):
        close(fed.state["bias"][i], torch.stack(seen).mean(0))
        assert int(fed.state["observed"][i]) == len(seen)


def test_a_block_is_no_longer_than_the_roster() -> None:
    half = WGAServer(made(users="all", block=8), problem(), torch.Generator().manual_seed(0))
    assert answer_shapes(WGA.messages, half.sizes)[Gradients]["gradient"][0] == 3


def test_optimal_weights_match_the_theory() -> None:
    known = {"bias": 0.5, "noise": 2.0, "horizon": 100}
    p = collaboration.CollaborationConstants(4, 0.5, 2.0)
    assert made(rule="wga", alpha="optimal", known=known).alpha_at(0, 4, 0) == collaboration.optimal_alpha(p, 0.05)
    bc = made(alpha="optimal", beta="optimal", known=known)
    beta = collaboration.optimal_beta(p, 100)
    assert bc.beta_at(0, 4) == beta
    assert bc.alpha_at(0, 4, beta) == collaboration.optimal_alpha_bc(p, 0.05, beta)
    oracle = made(rule="oracle", alpha="optimal", known=known, oracle_variance=3.0)
    assert oracle.alpha_at(0, 4, 0) == collaboration.optimal_alpha_oracle(p, 3.0)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"alpha": ()}, r"error, alpha\b.*empty"),
        ({"alpha": "optimal"}, "alpha: optimal .*known"),
        ({"users": "all", "user": "c1"}, "user: .*'c1'"),
        ({"weights": "inverse_variance", "batch_size": 1}, r"weights: .*batch_size 1\b"),
        ({"beta": "optimal", "known": {"bias": 1.0, "noise": 1.0}}, r"beta: optimal .*known\.horizon"),
    ],
)
def test_impossible_values_are_rejected(keys: dict[str, Any], found: str) -> None:
    with pytest.raises(ValidationError, match=found):
        made(**keys)


def test_a_client_that_is_not_a_user_starts_from_the_mean(tmp_path: Path) -> None:
    s, data = made(users="all", personalize_steps=2, batch_size=3), clients(SIZES)
    p = problem()
    fed = federation(tmp_path, WGA, s, dataclasses.replace(p, roster=("c0", "c1")), data, unseen=["c2"], rounds=2)
    fed.run()
    theta = fed.state["theta"]
    mean = (theta[0] + theta[1]) / 2
    for i in (0, 1):
        assert torch.equal(fed.predictors[2, f"c{i}"]["personal"].tensors()["theta"], theta[i])
    random = generator(SEED, "evaluate/personalize", "c2", 2)
    moved = mean
    for index in batches(SIZES[2], 3, 2, random):
        moved = moved - 0.05 * at(p, moved, data[2], index)
    close(fed.predictors[2, "c2"]["personal"].tensors()["theta"], moved)
    close(fed.predictors[2, "c2"]["global"].tensors()["theta"], mean)


def test_a_client_with_a_users_id_gets_no_user_state() -> None:
    server = WGAServer(made(users="all"), problem(same_clients=False), torch.Generator().manual_seed(0))
    server.state["theta"][:] = torch.arange(3.0)[:, None]
    sent: list[UserModel] = []

    class Cohort:
        clients = ("c0", "c2")

        def send(self, message: UserModel) -> None:
            sent.append(message)

        def record(self, name: str, values: Tensor) -> None:
            assert not values.any()

    server.personalize(Cohort())  # type: ignore[arg-type]
    assert sent[0].theta.unique().tolist() == [1.0]


def test_on_a_quadratic_bias_correction_finds_user_zeros_mean_and_wga_a_mix(tmp_path: Path) -> None:
    """Full batches: f_i(θ) = ‖θ - m_i‖²/2 without noise. WGA converges to m_0 + α (m_avg - m_0), BC to m_0."""
    means = torch.tensor([[0.0, 1.0], [4.0, 1.0], [0.0, -3.0]], dtype=torch.float64)
    data = [
        ClientData(f"c{i}", *(Split(m + torch.tensor([[1.0, 0], [-1, 0]]).double(), None) for _ in "tve"), 0)
        for i, m in enumerate(means)
    ]
    for rule in ("wga", "bc"):
        s = made(rule=rule, alpha=0.5, beta=0.2, lr=0.3, steps_per_round=150, batch_size=2)
        fed = run(tmp_path / rule, s, data, problem=problem(model=Quadratic(2)))
        fed.run()
        expected = means[0] + (0.5 * ((means[1] + means[2]) / 2 - means[0]) if rule == "wga" else 0)
        torch.testing.assert_close(fed.state["theta"][0], expected, atol=1e-9, rtol=0)


# --- stacked clients against single ones ------------------------------------------------------------------------------

STACKED: dict[str, dict[str, Any]] = {
    **{rule: {"rule": rule, "users": users} for rule, users in (("alone", "all"), ("wga", "one"), ("oracle", "all"))},
    "bc": {"rule": "bc", "users": "all"},
    "alone, one": {"rule": "alone", "users": "one"},
    "cosine": {"weights": "cosine", "users": "all"},
    "given": {"weights": {"c0": 1.0, "c1": 2.0}},
    "variances": {"weights": "inverse_variance", "users": "all"},
    "variances, one": {"weights": "inverse_variance"},
    "steps": {"steps_per_round": 2},
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.usefixtures("each_task")
def test_stacked_clients_reply_as_single_ones(name: str) -> None:
    """Two steps, a block of two states and then one, and gradients of all data in between, with unequal sizes."""
    s = made(**({"steps_per_round": 2} | STACKED[name]))
    p, data = problem(), clients((9, 2, 7))
    half, random = WGA.client(s, p), torch.Generator().manual_seed(5)
    states = torch.stack([p.model.init(random, torch.float64) for _ in range(3)])
    blocks = [[0, 1], [2]] if s.users == "all" else [[0]]
    number = torch.tensor

    def talk(rows: list[int]) -> list[dict[str, Tensor]]:
        messages: list[Any] = []
        for step in range(s.steps_per_round):
            for block in blocks:
                positions = number(block, dtype=torch.float64)
                messages.append(SharedStates(states[block], positions, number([float(step)]).double()))
                messages += [TrueGradients(states[block])] if s.rule == "oracle" else []
        talking = half.open(group([data[i] for i in rows]), messages[0])
        answers = [next(talking)] + [talking.send(message) for message in messages[1:]]
        return [answer.tensors() for answer in answers]

    together, alone = talk([0, 1, 2]), [talk([i]) for i in range(3)]
    for exchange, answer in enumerate(together):
        for key, value in answer.items():
            close(value, torch.cat([one[exchange][key] for one in alone]))
    assert together[0]["gradient"].abs().max() > 1e-4
    assert (together[0]["variance"] > 0).all() == (s.weights == "inverse_variance")


def test_a_client_with_one_example_has_no_variance_and_is_lost_alone() -> None:
    p, data = problem(), clients((9, 1, 7))
    members = group(data)
    opening = SharedStates(
        torch.zeros(1, p.model.layout.size).double(), torch.zeros(1).double(), torch.zeros(1).double()
    )
    answer = next(WGA.client(made(weights="inverse_variance"), p).open(members, opening))
    assert list(members.lost) == [1]
    assert all(tensor[[0, 2]].isfinite().all() for tensor in answer.tensors().values())
