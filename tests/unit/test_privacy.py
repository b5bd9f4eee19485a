"""Descriptors with differential privacy: the effect of replacing one example, the noise, and the guarantee."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import client, federation, setup
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import integrate, stats
from torch import Tensor
from vowel_runs import on_vowels

from fedloom import experiment as experiments
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.pefll import PEFLL, Descriptor, DescriptorRequest, PeFLLClient, PeFLLSettings, PeFLLTrainRequest
from fedloom.data.federated import ClientData, Split
from fedloom.data.pack import PackSettings, pack
from fedloom.engine.assemble import make_parts
from fedloom.engine.options import WorkerOptions
from fedloom.engine.results import conclude
from fedloom.engine.run_data import make_partition
from fedloom.engine.worker import Worker
from fedloom.errors import ExperimentError
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.randomness import generator
from fedloom.federation.transport import ConversationKey
from fedloom.models.embedding import EmbeddingSettings, clipped
from fedloom.privacy.gaussian_mechanism import compose, gaussian_delta, gaussian_epsilon, noise_multiplier, on_grid
from fedloom.transport.stream import Joined

Z = {"clip": 0.7, "noise_multiplier": 2.5}


def settings(privacy: dict[str, Any] | None = None, **descriptor: Any) -> PeFLLSettings:
    how = {"size": 4, "train": "all", "evaluate": "all", "privacy": privacy, **descriptor}
    return PeFLLSettings.model_validate({"local": {"steps": 1}, "embedding": {"network": "mlp"}, "descriptor": how})


def described(
    s: PeFLLSettings, data: ClientData, *, seed: int = 0, round: int = 1, secret: bytes | None = None
) -> Tensor:
    """Return the descriptor that leaves a client in training."""
    half = PeFLLClient(s, setup())
    eta_v = half.embedding.init(torch.Generator().manual_seed(5), torch.float64)
    group = ClientGroup([data], lambda c, use: generator(seed, f"train/{use}", c, round), secret=secret)
    answer: Any = next(half.open(group, PeFLLTrainRequest(eta_v)))
    found: Tensor = answer.v[0]
    return found


# --- (ε, δ) -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 8.0])
@pytest.mark.parametrize("z", [0.3, 1.0, 4.0])
def test_delta_equals_the_hockey_stick_divergence_by_quadrature(epsilon: float, z: float) -> None:
    """Integrate δ(ε) = ∫ max(0, p - e^ε q) of N(1, z²) and N(0, z²), without the closed form."""
    p, q = stats.norm(1, z), stats.norm(0, z)
    meet = 0.5 + epsilon * z * z  # above it p > e^ε q
    found, _ = integrate.quad(lambda x: p.pdf(x) - math.exp(epsilon) * q.pdf(x), meet, 1 + 40 * z, epsabs=1e-14)
    assert gaussian_delta(epsilon, z) == pytest.approx(found, rel=1e-7, abs=1e-13)


@pytest.mark.parametrize(
    ("epsilon", "releases", "z"),
    # found once with dp-accounting 0.6.0: calibrate_dp_mechanism(PLDAccountant, SelfComposed(Gaussian(z), k), ε, 1e-5)
    [(0.5, 1, 7.0318), (1, 1, 3.7306), (2, 1, 1.9938), (8, 1, 0.6002), (1, 10, 11.7973), (8, 250, 9.4905)],
)
def test_multipliers_equal_an_accountants(epsilon: float, releases: int, z: float) -> None:
    assert noise_multiplier(epsilon, 1e-5, releases) == pytest.approx(z, rel=2e-3)
    assert gaussian_epsilon(z, 1e-5, releases) == pytest.approx(epsilon, rel=5e-3)


@pytest.mark.parametrize(
    ("multipliers", "delta", "epsilon"),
    # found once with dp-accounting 0.6.0: PLDAccountant().compose(GaussianDpEvent(z)) for each, get_epsilon(δ)
    [((3.73, 1.99, 0.6), 1e-5, 8.557651511), ((7.03, 3.73, 30.0, 5.0), 1e-6, 1.598024266), ((), 1e-5, 0.0)],
)
def test_mixed_releases_match_an_accountant(multipliers: tuple[float, ...], delta: float, epsilon: float) -> None:
    assert gaussian_epsilon(compose(multipliers), delta) == pytest.approx(epsilon, rel=1e-6)


@given(st.floats(1e-3, 200), st.floats(1e-12, 0.4), st.integers(1, 10_000))
def test_noise_is_never_below_the_guarantee(epsilon: float, delta: float, releases: int) -> None:
    z = noise_multiplier(epsilon, delta, releases)
    assert gaussian_delta(epsilon, z / math.sqrt(releases)) <= delta
    assert gaussian_delta(epsilon, 0.999 * z / math.sqrt(releases)) > delta
    assert gaussian_epsilon(z, delta, releases) <= epsilon * (1 + 1e-6)


def test_limits_of_the_noise_multiplier() -> None:
    assert noise_multiplier(math.inf, 1e-5) == 0
    assert gaussian_epsilon(0.0, 1e-5) == math.inf
    assert gaussian_epsilon(1.0, 1e-5, releases=0) == 0
    assert gaussian_delta(1e6, 0.01) >= 0  # e^ε overflows


# --- the effect of one example ----------------------------------------------------------------------------------------


finite = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(
    st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=6), st.lists(finite, min_size=3, max_size=3)
)
def test_one_embedding_moves_the_mean_by_at_most_2c_over_n(rows: list[list[float]], other: list[float]) -> None:
    c, n = 0.7, len(rows)
    before = torch.tensor(rows, dtype=torch.float32)
    after = before.clone()
    after[n // 2] = torch.tensor(other)
    means = [clipped(embedded, c).mean(0) for embedded in (before, after)]
    assert clipped(before, c).norm(dim=1).max() <= c * (1 + 1e-12)
    assert (means[0] - means[1]).norm() <= 2 * c / n * (1 + 1e-12)


def test_the_bound_of_2c_over_n_is_attained() -> None:
    rows = torch.zeros(5, 3)
    rows[0, 1] = 100.0
    assert (clipped(rows, 0.7).mean(0) - clipped(rows - 2 * rows, 0.7).mean(0)).norm() == pytest.approx(2 * 0.7 / 5)


@pytest.mark.parametrize("value", [0.0, 1e30, -1e308, 1e308])
@pytest.mark.parametrize("n", [1, 9])
def test_any_change_of_one_example_moves_the_descriptor_within_the_bound(value: float, n: int) -> None:
    s, data = settings({"clip": 0.01, "noise_multiplier": 0.0}), client("c0", n)
    x, y = data.train.x.clone(), data.train.y
    x[0] = value  # for the larger ones the embedding is not finite
    moved = described(s, data) - described(s, replace(data, train=Split(x, y)))
    assert moved.isfinite().all()
    assert moved.norm() <= 2 * 0.01 / n * (1 + 1e-6)


# --- the noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_noise_is_normal_with_the_stated_deviation(secret: bytes | None) -> None:
    data, quiet = client("c0", 8), settings({**Z, "noise_multiplier": 0.0})
    s, n = settings(Z), 8
    mean = described(quiet, data)
    other = [replace(data, train=Split(data.train.x + i * 1e-9, data.train.y)) for i in range(400)]
    found = [described(s, c, round=i, secret=secret) - mean for i, c in enumerate(other)]
    standard = torch.stack(found).flatten().numpy() / (2.5 * 2 * 0.7 / n)
    assert stats.kstest(standard, "norm").pvalue > 1e-3
    # χ² of 1600 squares: a deviation 8 % off would be beyond it
    assert abs(float((standard**2).sum()) - 1600) < 3.3 * math.sqrt(2 * 1600)
    assert abs(float((standard**2).sum()) / 1.08**2 - 1600) > 3.3 * math.sqrt(2 * 1600)


def test_noise_follows_the_seed_in_simulations_and_the_secret_otherwise() -> None:
    s, data = settings(Z), client("c0", 8)
    assert torch.equal(described(s, data), described(s, data))
    assert not torch.equal(described(s, data), described(s, data, seed=1))
    hidden = described(s, data, secret=b"a" * 32)
    assert torch.equal(hidden, described(s, data, seed=1, round=7, secret=b"a" * 32))  # the same request again
    assert not torch.equal(hidden, described(s, data, secret=b"b" * 32))
    assert not torch.equal(hidden, described(s, data))


def test_a_secret_never_gives_two_values_equal_noise() -> None:
    """Otherwise their difference would be revealed."""
    data, quiet, secret = client("c0", 8), settings({**Z, "noise_multiplier": 0.0}), b"a" * 32
    x = data.train.x.clone()
    x[0] += 1
    other = replace(data, train=Split(x, data.train.y))
    noise = {described(settings(Z), c, secret=secret).sub(described(quiet, c)).sum().item() for c in (data, other)}
    noise |= {described(settings({**Z, "delta": 0.01}), data, secret=secret).sub(described(quiet, data)).sum().item()}
    noise |= {described(settings(Z), replace(data, id="c1"), secret=secret).sub(described(quiet, data)).sum().item()}
    assert len(noise) == 4


def test_training_and_evaluation_have_separate_noise() -> None:
    s, data = settings(Z), client("c0", 8)
    half = PeFLLClient(s, setup())
    eta_v = half.embedding.init(torch.Generator().manual_seed(5), torch.float64)
    for secret in (None, b"a" * 32):
        group = ClientGroup([data], lambda c, use: generator(0, use, c, 1), secret=secret)
        training, evaluation = (
            next(half.open(group, opening(eta_v))).tensors()["v"] for opening in (PeFLLTrainRequest, DescriptorRequest)
        )
        assert not torch.equal(training, evaluation)


def test_low_order_digits_are_not_released() -> None:
    values = torch.tensor([0.1, 1 / 3, -2e3], dtype=torch.float64)
    found = on_grid(values, 0.3)
    assert torch.equal(found * 2**22, (found * 2**22).round())
    assert (found - values).abs().max() <= 0.3 * 2**-20


# --- in training ------------------------------------------------------------------------------------------------------


def test_without_noise_it_is_a_mean_summed_in_float64(tmp_path: Path) -> None:
    """With a clip that is never reached and no noise, rounds are equal."""
    data, states = [client(f"c{i}", 6, seed=i) for i in range(3)], []
    for name, privacy in (("off", None), ("on", {"clip": 1e9, "noise_multiplier": 0.0})):
        held = federation(tmp_path / name, PEFLL, settings(privacy), setup(), data, rounds=2)
        held.loop.run()
        states.append(held.loop.server.state)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-12)


def test_gradients_flow_through_the_clip() -> None:
    """Compare η_v's part of a round with autograd from end to end."""
    s, data = settings({"clip": 0.5, "noise_multiplier": 0.0}), client("c0", 7)
    half = PeFLLClient(s, setup())
    eta_v = half.embedding.init(torch.Generator().manual_seed(5), torch.float64)
    group = ClientGroup([data], lambda c, use: generator(0, use, c, 1))
    _, pullback = half._describe(group, eta_v, "all", "descriptor")
    d_v = torch.tensor([[0.3, -1.0, 0.5, 2.0]], dtype=torch.float64)
    leaf = eta_v.clone().requires_grad_()
    embedded = half.embedding.forward(half.embedding.layout.split(leaf), data.train.x, data.train.y)
    norms = [float(e.detach().norm()) for e in embedded]
    assert min(norms) < 0.5 < max(norms)
    rows = [e if norm <= 0.5 else 0.5 * e / e.norm() for e, norm in zip(embedded, norms, strict=True)]
    (expected,) = torch.autograd.grad((torch.stack(rows).mean(0) * d_v[0]).sum(), leaf)
    torch.testing.assert_close(pullback(d_v)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", ["train", "evaluate"])
def test_a_batch_of_the_data_is_rejected(which: str) -> None:
    with pytest.raises(ValidationError, match=f"privacy: .*{which}.*all.*batch"):
        settings(Z, **{which: "batch"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip", 0), ("clip", math.inf), ("noise_multiplier", -1), ("delta", 0), ("delta", 0.011), ("delta", 1)],
)
def test_invalid_privacy_is_rejected(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        settings({**Z, key: value})


def test_the_summary_states_the_guarantee_of_the_client_that_answered_most(tmp_path: Path) -> None:
    how = {"name": "pefll", "local": {"steps": 1}, "embedding": {"network": "mlp"}}
    how |= {"descriptor": {"train": "all", "evaluate": "all", "privacy": {**Z, "delta": 1e-6}}}
    loop = on_vowels(tmp_path, how, rounds=3)
    final = loop.run()
    reported = conclude(
        make_parts(experiments.load_experiment(tmp_path / "run" / "experiment.yaml"), loop.manifest), loop, final, 1.0
    )
    promised = reported["pefll"]["privacy"]
    asked = [name for a in loop.journal.attempts for held in a.conversations for name in held.clients]
    most = max(map(asked.count, asked)) + len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert promised["releases_most"] == most > 2
    assert promised["epsilon_most"] == pytest.approx(gaussian_epsilon(2.5 / math.sqrt(most), 1e-6), rel=1e-6)
    assert promised["epsilon_new_client"] == gaussian_epsilon(2.5, 1e-6)
    assert promised["covers"] == ["Descriptor"]
    assert promised["does_not_cover"] == ["Update", "EmbeddingUpdate", "Metrics"]
    assert promised["noise"] == "seed"
    json.dumps(promised, allow_nan=False)


def test_a_missing_clip_is_rejected() -> None:
    with pytest.raises(ExperimentError, match=r"\bclip\b"):
        PEFLL.private(settings(), None, 1.0, 1e-5)
    assert PEFLL.private(settings(Z), None, 1.0, 1e-5).descriptor.privacy.clip == 0.7  # type: ignore[union-attr]
    assert PEFLL.private(settings(Z), 0.5, 1.0, 1e-5).descriptor.privacy.clip == 0.5  # type: ignore[union-attr]


OWN = """
name: own
data:
  own: {kind: features, input_shape: [2], classes: [a, b], normalization: {mean: [0, 0], std: [1, 1]}}
model: {name: mlp, hidden: [4]}
algorithm:
  name: pefll
  embedding: {network: mlp}
  descriptor: {size: 4, train: all, evaluate: all, privacy: {clip: 0.7, noise_multiplier: 2.5}}
federation: {rounds: 1, clients_per_round: 1}
"""


def test_a_worker_uses_secret_noise_for_own_data_and_seeded_noise_for_a_partition(tmp_path: Path) -> None:
    (tmp_path / "eve.csv").write_text("u,v,label\n" + "".join(f"{i / 7},{i % 3},{'ab'[i % 2]}\n" for i in range(30)))
    pack(tmp_path / "eve.csv", tmp_path / "eve", PackSettings())
    own = experiments.parse_experiment(OWN)
    reported: dict[str, Any] = {"normalization": {"mean": [0.0, 0.0], "std": [1.0, 1.0]}}
    secret = answers_of_workers(own, "eve", reported, WorkerOptions(packed=(tmp_path / "eve",)))
    assert torch.equal(secret[0], secret[1])  # the same worker again
    assert not torch.equal(secret[0], secret[2])  # another

    how = {"name": "pefll", "embedding": {"network": "mlp"}}
    how |= {"descriptor": {"train": "all", "evaluate": "all", "privacy": Z}}
    run = on_vowels(tmp_path, how).folder.path
    dealt = experiments.load_experiment(run / "experiment.yaml")
    dataset = make_partition(dealt)
    name = dataset.manifest.roster[0]
    reported = {"partition": dataset.manifest.fingerprint}
    seeds = answers_of_workers(dealt, name, reported, WorkerOptions(str(dataset.folder)))
    assert torch.equal(seeds[0], seeds[2])


def answers_of_workers(e: Experiment, client: str, reported: dict[str, Any], options: WorkerOptions) -> list[Tensor]:
    """Return the descriptors of a client by a worker, by the same one again, and by another of the same kind."""
    joined = Joined("run", "life", json.dumps({"experiment": e.shared_json(), **reported}))
    found = []
    workers = [Worker("127.0.0.1:1", name, options) for name in ("one", "two")]
    for worker in (workers[0], *workers):
        session = worker._session(joined)
        size = EmbeddingSettings(network="mlp").network_for(*shape_of(e)).layout.size
        eta_v = torch.linspace(-1, 1, size)
        _, answer = next(
            iter(session.answer(ConversationKey(1, 1, 0, "train"), 0, [0], [client], PeFLLTrainRequest(eta_v)))
        )
        assert isinstance(answer, Descriptor), answer
        found.append(answer.v)
    return found


def shape_of(e: Experiment) -> tuple[str, tuple[int, ...], int, int]:
    """Return kind, shape, classes and l of an experiment in this file."""
    return ("features", (2,), 2, 4) if isinstance(e.data, OwnData) else ("features", (9,), 11, 1 + 15 // 4)
