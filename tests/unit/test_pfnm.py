"""PFNM: its matching against brute force and copies of one network, and its rounds (Yurochkin et al., ICML 2019)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, clients, close, federation, setup
from pydantic import ValidationError
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.pfnm import PFNM, PFNMSettings, gains, match, network, neurons, pool, wide
from fedloom.errors import ExperimentError
from fedloom.models.networks import MLP, LeNet

SIZES = (4, 9, 6)
LOCAL: dict[str, Any] = {"steps": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.0}


def problem(n: int = 3) -> Setup:
    return dataclasses.replace(setup(), roster=tuple(f"c{i}" for i in range(n)))


def made(**changes: Any) -> PFNMSettings:
    return PFNMSettings.model_validate({"local": LOCAL} | changes)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assign(gain: Tensor) -> Tensor:
    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def matched(v: Tensor, p: Tensor | None = None, **changes: Any) -> Tensor:
    keys: dict[str, Any] = {"prior": 1.0, "gamma": 1.0, "cap": 700, "sweeps": 3}
    p = torch.ones(len(v), v.shape[2], dtype=torch.float64) if p is None else p
    start = torch.full(v.shape[:2], -1)
    return match(v, p, start, assign, **{**keys, **changes}, generator=torch.Generator().manual_seed(0))


# --- the matching -----------------------------------------------------------------------------------------------------


def test_gains_are_differences_of_the_log_posterior() -> None:
    """Compute twice log N of an atom's neurons with the atom integrated out, with and without a new neuron."""
    v, p, prior = normal(3, 4), torch.tensor([0.5, 1.0, 2.0, 0.3]).double(), 0.7
    others = normal(2, 3, 4, seed=2)
    precisions = normal(2, 4, seed=3).abs()
    total, precision, count = pool(others, precisions, torch.tensor([[0, 1, 2], [2, 0, 3]]), prior)
    assert count.tolist() == [2, 1, 2, 1]
    found = gains(v, p, total, precision, count, 3, prior, 1.5, 3)

    def quadratic(s: Tensor, q: Tensor) -> float:
        return float((s.square() / q).sum())

    for row in range(3):
        for i in range(4):
            s, q = total[i], precision[i]
            expected = quadratic(s + p * v[row], q + p) - quadratic(s, q) + 2 * math.log(count[i] / (3 - count[i]))
            assert float(found[row, i]) == pytest.approx(expected, abs=1e-12)
        for k in (1, 2, 3):
            expected = quadratic(p * v[row], prior + p) - 2 * math.log(k) + 2 * math.log(1.5 / 3)
            assert float(found[row, 3 + k]) == pytest.approx(expected, abs=1e-12)


def test_gains_and_means_with_a_prior_mean_match_least_squares() -> None:
    """An atom is the θ of least prior (θ - μ0)² + Σ p (v - θ)²; a gain is the decrease of the sum of those."""
    prior, networks, gamma = 0.7, 4, 1.5
    centre = torch.tensor([0.0, 0.1, -2.0]).double()
    v, p = normal(2, 3), torch.tensor([0.5, 1.0, 2.0]).double()
    others, precisions = normal(2, 1, 3, seed=2), normal(2, 3, seed=3).abs() + 0.1
    total, precision, count = pool(others, precisions, torch.tensor([[0], [0]]), prior, centre)

    def fitted(values: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Return the best atom ``[K]`` of some neurons, and its sum of squares."""
        x = torch.stack([centre, *values], 1)  # [K, m]
        root = torch.stack([torch.full_like(centre, prior), *weights], 1).sqrt()
        atom = torch.linalg.lstsq(root[..., None], (root * x)[..., None]).solution[:, 0, 0]
        return atom, float((root * (x - atom[:, None])).square().sum())

    held, of = [others[0, 0], others[1, 0]], list(precisions)
    close((total / precision)[0], fitted(held, of)[0])
    found = gains(v, p, total, precision, count, networks, prior, gamma, 1, centre)
    for row in range(2):
        apart = fitted(held, of)[1] + fitted([v[row]], [p])[1]
        expected = apart - fitted([*held, v[row]], [*of, p])[1]
        expected += 2 * math.log(2 / (networks - 2)) - 2 * math.log(gamma / networks)
        assert float(found[row, 0] - found[row, 1]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("networks", [2, 5])
def test_permuted_copies_are_matched_and_shrunk_by_the_prior(networks: int) -> None:
    """The width stays; incoming weights are scaled by J/(J+1), outgoing ones by 1/2 with shares of classes."""
    v = 3 * normal(6, 9)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(j)) for j in range(networks)]
    copies = torch.stack([v[order] for order in orders])
    p = torch.ones(networks, 9, dtype=torch.float64)
    p[:, 7:] = 1 / networks  # two classes
    found = matched(copies, p)
    assert int(found.max()) == 5
    total, precision, count = pool(copies, p, found, 1.0)
    assert count.tolist() == [networks] * 6
    for order, atoms in zip(orders, found, strict=True):
        mean = (total / precision)[atoms]
        close(mean[:, :7], v[order][:, :7] * networks / (networks + 1))
        close(mean[:, 7:], v[order][:, 7:] / 2)


def test_unlike_networks_get_separate_neurons_up_to_the_limit() -> None:
    far = 30 * torch.eye(15, dtype=torch.float64).view(3, 5, 15)  # at right angles
    assert int(matched(far, gamma=30.0).max()) == 14
    for cap in (5, 9):
        found = matched(far, cap=cap, gamma=30.0)
        assert int(found.max()) == cap - 1
        assert all(len(set(atoms)) == 5 for atoms in found.tolist())


# --- all networks together, from the posterior itself -----------------------------------------------------------------


def posterior(v: Tensor, p: Tensor, atoms: Sequence[Sequence[int]], prior: float, gamma: float) -> float:
    """Return twice the log posterior of a joint assignment, up to a common constant: best atoms, and eq. 4's process.

    Of an atom with m of J networks the Beta-Bernoulli process has γ (m - 1)! (J - m)!/J!.
    """
    found, networks = 0.0, len(v)
    for atom in {i for row in atoms for i in row}:
        of = [(j, row.index(atom)) for j, row in enumerate(atoms) if atom in row]
        s, q = sum(p[j] * v[j, at] for j, at in of), prior + sum(p[j] for j, _ in of)
        found += float((torch.as_tensor(s) ** 2 / q).sum())
        ways = math.factorial(len(of) - 1) * math.factorial(networks - len(of)) / math.factorial(networks)
        found += 2 * math.log(gamma * ways)
    return found


def own(atoms: Sequence[Sequence[int]], j: int) -> int:
    """Return the number of atoms that only network j has."""
    others = {i for k, row in enumerate(atoms) if k != j for i in row}
    return len(set(atoms[j]) - others)


def every_joint_assignment(networks: int, length: int, cap: int) -> Iterator[list[tuple[int, ...]]]:
    """Return each once: new atoms are numbered in the order of their first neuron."""

    def further(done: list[tuple[int, ...]], width: int) -> Iterator[list[tuple[int, ...]]]:
        if len(done) == networks:
            yield done
            return
        for row in itertools.permutations(range(min(width + length, cap)), length):
            fresh = [i for i in row if i >= width]
            if fresh == list(range(width, width + len(fresh))):
                yield from further([*done, row], width + len(fresh))

    return further([], 0)


def drawn(networks: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return neurons around shared atoms, so close that matching is ambiguous, with unequal precisions, some 0."""
    random = torch.Generator().manual_seed(seed)
    atoms = 1.5 * torch.randn(length + 1, 3, generator=random, dtype=torch.float64)
    rows = [torch.randperm(length + 1, generator=random)[:length] for _ in range(networks)]
    v = torch.stack([atoms[row] for row in rows])
    v = v + torch.randn(v.shape, generator=random, dtype=torch.float64)
    shares = torch.rand(networks, 3, generator=random, dtype=torch.float64)
    return v, torch.where(shares < 0.15, 0, shares) * 2


@pytest.mark.parametrize(("networks", "length", "cap"), [(3, 2, 700), (4, 2, 3), (3, 3, 700), (5, 2, 700)])
@pytest.mark.parametrize("seed", range(3))
def test_no_single_network_has_a_better_match(networks: int, length: int, cap: int, seed: int) -> None:
    """After some sweeps, the assignment of each network has the highest posterior of all its assignments."""
    v, p = drawn(networks, length, seed)
    found = [tuple(row) for row in matched(v, p, prior=0.7, gamma=1.3, cap=cap, sweeps=12).tolist()]
    assert max(max(row) for row in found) < cap

    def given_the_others(atoms: list[tuple[int, ...]], j: int) -> float:  # k new atoms are a Poisson count: 1/k!
        return posterior(v, p, atoms, 0.7, 1.3) - 2 * math.lgamma(own(atoms, j) + 1)

    for j in range(networks):
        others = sorted({i for k, row in enumerate(found) if k != j for i in row})
        free = [i for i in range(networks * length) if i not in others][: min(length, cap - len(others))]
        best = max(
            given_the_others([*found[:j], row, *found[j + 1 :]], j)
            for row in itertools.permutations([*others, *free], length)
        )
        assert given_the_others(found, j) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_several_orders_is_the_best_joint_assignment(seed: int) -> None:
    """Sweeps improve one network at a time: one order may end below the optimum, the best of ten does not."""
    v, p = drawn(3, 2, 10 + seed)
    every = [posterior(v, p, atoms, 0.7, 1.3) for atoms in every_joint_assignment(3, 2, 700)]
    assert len(every) == 2 * 7 + 4 * 13 + 21  # by hand: two share both neurons, one, or none; then the third
    start = torch.full(v.shape[:2], -1)
    ends = []
    for order in range(10):
        keys: dict[str, Any] = {"prior": 0.7, "gamma": 1.3, "cap": 700, "sweeps": 8}
        atoms = match(v, p, start, assign, **keys, generator=torch.Generator().manual_seed(order))
        ends.append(posterior(v, p, [tuple(row) for row in atoms.tolist()], 0.7, 1.3))
    assert max(ends) == pytest.approx(max(every), abs=1e-9)


# --- the method -------------------------------------------------------------------------------------------------------


def test_networks_are_split_and_rebuilt() -> None:
    p = problem()
    theta = p.model.init(torch.Generator().manual_seed(3), torch.float64)
    units, out = neurons(p, theta[None])
    assert units.shape == (1, 5, 256 + 1 + CLASSES)
    assert torch.equal(network(units[0], out[0], p), theta)
    x, order = normal(4, *IMAGE), torch.tensor([3, 1, 4, 0, 2])
    close(p.model.logits(network(units[0][order], out[0], p), x), p.model.logits(theta, x))
    twice = torch.cat([units[0], units[0]])  # two of every unit: hidden sums double
    both = network(twice, out[0], p)
    close(wide(p, both).logits(both, x) - out[0], 2 * (p.model.logits(theta, x) - out[0]))


def test_a_single_client_gets_its_network_scaled_by_its_precisions(tmp_path: Path) -> None:
    """J = 1: every value is n p v/(1/σ0² + p). With a wide prior it is the client's own network."""
    p, data = problem(1), clients((9,))
    for sigma0, atol in ((1.0, 1e-12), (1e6, 1e-9)):
        run = federation(tmp_path / str(sigma0), PFNM, made(sigma0=sigma0, output="uniform"), p, data)
        run.run()
        factor = 1 / (1 + sigma0**-2)
        found = run.predictors[1, "c0"]["global"].tensors()["theta"]
        v, out = neurons(p, run.state["models"])
        close(found, factor * network(v[0].index_select(0, run.state["atoms"][0].argsort()), out[0], p), atol)


def test_biases_shrink_towards_their_prior_mean(tmp_path: Path) -> None:
    """J = 1: (p b + μ0/σ0²)/(p + 1/σ0²), hidden and output; weights shrink towards 0."""
    p, data = problem(1), clients((9,))
    run = federation(tmp_path, PFNM, made(bias_mean=0.1, sigma=0.5, sigma0=2.0, output="uniform"), p, data)
    run.run()
    found = p.model.layout.split(run.predictors[1, "c0"]["global"].tensors()["theta"])
    own = p.model.layout.split(run.state["models"][0])
    order = run.state["atoms"][0].argsort()
    close(found["fc1.bias"], (4 * own["fc1.bias"][order] + 0.1 / 4) / (4 + 1 / 4))
    close(found["fc2.bias"], (4 * own["fc2.bias"] + 0.1 / 4) / (4 + 1 / 4))
    close(found["fc1.weight"], 4 * own["fc1.weight"][order] / (4 + 1 / 4))
    close(found["fc2.weight"], 4 * own["fc2.weight"][:, order] / (4 + 1 / 4))


def test_rounds_merge_and_continue_from_each_clients_atoms(tmp_path: Path) -> None:
    """Also if only some are drawn: the others count by their last networks."""
    p, data, s = problem(), clients(SIZES), made(output="classes", sigma=0.5)
    runs = [federation(tmp_path / str(t), PFNM, s, p, data, rounds=t, cohort=2) for t in (1, 2, 3)]
    states = []
    for run in runs:
        run.run()
        states.append(run.state)
    for before, after, attempt in zip(states, states[1:], runs[2].loop.journal.counted()[1:], strict=False):
        drawn = {int(id[1:]) for id in attempt.conversations[0].clients}
        for i in range(3):
            same = torch.equal(before["models"][i], after["models"][i])
            assert same == (i not in drawn)
    last = states[2]
    known = last["atoms"][:, 0] >= 0
    counts = torch.stack([torch.bincount(c.train.y, minlength=CLASSES) for c in data if c.train.y is not None]).double()
    assert torch.equal(last["classes"][known], counts[known])
    width = int(last["atoms"].max()) + 1
    assert runs[2].loop.journal.counted()[2].statistics["width"] == width
    theta = runs[2].predictors[3, "c0"]["global"].tensors()["theta"]
    v, _ = neurons(p, last["models"])
    shares = counts[known] / counts[known].sum(0)
    unit = int(last["atoms"][known][0, 0])
    holders = [(j, row.tolist().index(unit)) for j, row in enumerate(last["atoms"]) if unit in row.tolist()]
    model = wide(p, theta)
    named = model.layout.split(theta)
    assert named["fc1.bias"].shape == (width,)
    precision = 1 / s.sigma**2
    mean = sum(precision * v[j, at, 256] for j, at in holders) / (1 + precision * len(holders))
    close(named["fc1.bias"][unit], torch.as_tensor(mean))
    row = {j: i for i, j in enumerate(known.nonzero().flatten().tolist())}
    top = sum(precision * shares[row[j], 1] * v[j, at, 258] for j, at in holders)
    bottom = 1 + sum(precision * shares[row[j], 1] for j, at in holders)
    close(named["fc2.weight"][1, unit], torch.as_tensor(top / bottom))


def test_invalid_settings_are_rejected() -> None:
    for model in (LeNet(IMAGE, CLASSES), MLP(IMAGE, [], CLASSES), MLP(IMAGE, [4, 4], CLASSES)):
        with pytest.raises(ExperimentError, match=r"model.name"):
            PFNM.check_model(made(), model)
    with pytest.raises(ExperimentError, match=r"algorithm.cap: .*\b5\b.*\b4\b"):
        PFNM.check_model(made(cap=4), problem().model)
    for key in ("sigma", "sigma0", "gamma", "sweeps", "cap"):
        with pytest.raises(ValidationError, match=key):
            made(**{key: 0})
    assert PFNM.sums_suffice(made()) is not None
