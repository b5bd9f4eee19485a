"""Differential privacy of clients through the round loop: clipping, noise, draws, the adaptive norm, and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import refusing
from federations import IMAGE, Federation, clients, federation, problem_of, variant
from safetensors.torch import load_file
from test_bad_settings import GOOD
from torch import Tensor

import fedloom
from fedloom.algorithms.base import Algorithm, find_algorithm
from fedloom.algorithms.fedavg import FedAvgServer, SharedModel, Update
from fedloom.algorithms.pfedbayes import GlobalGaussian, LocalizedGaussian
from fedloom.algorithms.scaffold import ControlledUpdate
from fedloom.errors import DataError, ExperimentError, QuorumError
from fedloom.experiment import load_experiment
from fedloom.federation.private_sums import BIT, PrivateSums, clipped_answer, clipped_values
from fedloom.federation.releases import count_training_releases
from fedloom.federation.transport import ConversationKey
from fedloom.models.networks import MLP
from fedloom.privacy.accounting import sampled
from fedloom.privacy.adaptive_clip import update_multiplier
from fedloom.privacy.clipped_sum import ClippedSum, small_cohort_odds
from fedloom.privacy.noise import NoiseSource
from fedloom.privacy.settings import AdaptiveClip, SecureAggregation, TrainingPrivacy
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.summation import Summation
from fedloom.sums.vector import PrivateVector

METHODS = (
    "fedavg", "scaffold", "fedrep", "pfedbayes", "comfedl", "fedadam", "q-fedavg", "feddyn", "ditto", "fedproto",
)  # fmt: skip
SIZES = (12, 7, 9, 16, 11)
WIDE = SecureAggregation(bits=64, range=1000)
SEED = 7


def privacy(**keys: Any) -> TrainingPrivacy:
    """Return keys of ``federation.privacy``, by default without noticeable noise or clipping."""
    return TrainingPrivacy(**{"clip": 1e3, "noise_multiplier": 1e-12, "delta": 1e-5, "sampling": "fixed", **keys})


def settings_of(name: str) -> Any:
    """Return settings with uniform weights."""
    method = find_algorithm(name)
    keys = {"weighting": "uniform"} if "weighting" in method.settings.model_fields else {}
    return method.settings(**keys, **({"scale": "literal", "gamma": 1e3} if name == "comfedl" else {}))


def parts(
    method: Algorithm,
    settings: Any,
    asked: TrainingPrivacy | None,
    secure: SecureAggregation | None,
    cohort: int,
    seed: int | None = SEED,
) -> dict[str, Any]:
    """Return what both sides of a federation need for private sums."""
    fields, dtype = method.sums(settings), torch.float64
    summation = Summation(fields, secure, asked, dtype, clients_per_round=cohort)
    held = HeldAnswers(summation, NO_SIGNING, seed)
    private = None if asked is None else PrivateSums(asked, cohort, seed, is_secure=secure is not None)
    return {"summation": summation, "held": held, "private_sums": private}


def made(
    folder: Path,
    name: str,
    asked: TrainingPrivacy | None,
    secure: SecureAggregation | None = None,
    *,
    rounds: int = 2,
    cohort: int = len(SIZES),
    seed: int | None = SEED,
    **keys: Any,
) -> Federation:
    """Return a federation of five clients."""
    method, settings, data = find_algorithm(name), settings_of(name), clients(SIZES)
    problem = problem_of(MLP(IMAGE, (8,), 3), data, roster=tuple(c.id for c in data))
    both = parts(method, settings, asked, secure, cohort, seed)
    return federation(folder, method, settings, problem, data, rounds=rounds, cohort=cohort, **both, **keys)


def trained(*args: Any, **keys: Any) -> Mapping[str, Tensor]:
    """Return the server's state after the rounds."""
    run = made(*args, **keys)
    run.run()
    return run.loop.server.state


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", METHODS)
def test_without_noise_and_clipping_private_sums_are_plain_means(name: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", name, None)
    for i, (asked, secure) in enumerate(
        [(privacy(), None), (privacy(), WIDE), (privacy(adaptive_clip=AdaptiveClip()), None)]
    ):
        found = trained(tmp_path / str(i), name, asked, secure)
        for key, value in plain.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_fields_of_an_answer_are_clipped_jointly(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, 400, generator=random).to(dtype) for _ in range(2))
    count = torch.ones(1, 1, dtype=torch.float64)
    answer, fields = (
        ControlledUpdate(first, count, count, second),
        find_algorithm("scaffold").sums(None)[ControlledUpdate],
    )
    request = SharedModel(torch.zeros(400))
    rule = ClippedSum(clip=3.0, noise_multiplier=1.0)
    found = clipped_answer(answer, request, fields, rule)
    assert isinstance(found, ControlledUpdate)
    both, before = torch.cat([found.delta_theta, found.delta_c], 1).double(), torch.cat([first, second], 1).double()
    assert float(both.norm()) == pytest.approx(3.0, rel=1e-6)
    torch.testing.assert_close(both, before * 3 / before.norm(), rtol=1e-6, atol=0)
    assert torch.equal(found.steps, count)
    assert clipped_answer(answer, request, fields, ClippedSum(float(before.norm()) + 1e-6, 1.0)) is answer


def test_changes_are_clipped_if_an_answer_has_a_vector() -> None:
    random = torch.Generator().manual_seed(0)
    start, moved = torch.randn(2, 50, generator=random) - 5, torch.randn(1, 2, 50, generator=random)
    answer = LocalizedGaussian(start + moved, torch.ones(1, 1), torch.ones(1, 1))
    fields = find_algorithm("pfedbayes").sums(find_algorithm("pfedbayes").settings())[LocalizedGaussian]
    found = clipped_answer(answer, GlobalGaussian(start), fields, ClippedSum(2.0, 1.0))
    torch.testing.assert_close(found.tensors()["v"] - start, moved * 2 / moved.norm(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("secure", [None, WIDE])
def test_a_round_sums_clipped_changes_and_divides_by_the_expected_cohort(
    secure: SecureAggregation | None, tmp_path: Path
) -> None:
    """A lost client lowers the sum, but not its divisor."""
    start = made(tmp_path / "start", "fedavg", None, rounds=0).state["theta"]
    whole = trained(tmp_path / "plain", "fedavg", None, rounds=1)["theta"] - start
    clipped = trained(tmp_path / "clipped", "fedavg", privacy(clip=1e-3), secure, rounds=1)["theta"] - start
    assert float(clipped.norm()) <= 1e-3
    one = trained(tmp_path / "one", "fedavg", None, rounds=1, cohort=1)["theta"] - start
    private = privacy(clip=1e-3)
    if secure is None:
        found = trained(tmp_path / "one-clipped", "fedavg", private, rounds=1, cohort=1)["theta"] - start
        torch.testing.assert_close(found, one * 1e-3 / one.norm(), rtol=1e-6, atol=1e-12)
    left = trained(tmp_path / "left", "fedavg", None, rounds=1, lost={0: 2})["theta"] - start
    found = trained(tmp_path / "left-private", "fedavg", privacy(), secure, rounds=1, lost={0: 2})["theta"] - start
    torch.testing.assert_close(found, left * 4 / 5, rtol=1e-6, atol=1e-9)
    assert not torch.equal(left, whole)


def test_the_aggregator_rejects_an_answer_beyond_the_clipping_norm(tmp_path: Path) -> None:
    method, settings, data = find_algorithm("fedavg"), settings_of("fedavg"), clients(SIZES)
    asked = privacy(clip=1e-3)
    both = parts(method, settings, asked, None, len(SIZES))
    del both["held"]  # it is not clipped
    problem = problem_of(MLP(IMAGE, (8,), 3), data, roster=tuple(c.id for c in data))
    run = federation(tmp_path, method, settings, problem, data, **both)
    with refusing(QuorumError, "norm", "0.001"):
        run.run()


# --- noise ------------------------------------------------------------------------------------------------------------


def chi_square(noise: Tensor, deviation: float) -> None:
    """Check a variance, and a mean of 0, within five standard errors."""
    n = noise.numel()
    ratio = float(noise.square().sum()) / deviation**2
    assert abs(ratio - n) < 5 * math.sqrt(2 * n)
    assert abs(float(noise.mean())) < 5 * deviation / math.sqrt(n)


@pytest.mark.parametrize(
    ("noise", "secure", "adaptive"),
    [
        ("central", None, False),
        ("central", None, True),
        ("central", SecureAggregation(bits=32), False),
        ("distributed", SecureAggregation(bits=32), False),
        ("distributed", SecureAggregation(bits=64), True),
    ],
)
def test_noise_of_a_sum_has_the_deviation_of_the_multiplier(
    noise: str, secure: SecureAggregation | None, adaptive: bool, tmp_path: Path
) -> None:
    """With adaptive clipping the update has more noise, to compensate for the released bits.

    Shares are for a sum of as few clients as may survive: 4 of 5.
    """
    clip, z, count_noise = 0.5, 1.5, 2.0
    asked = privacy(clip=clip, noise=noise, adaptive_clip=AdaptiveClip(count_noise=count_noise) if adaptive else None)
    noisy = asked.model_copy(update={"noise_multiplier": z})
    found, exact = (
        trained(tmp_path / name, "fedavg", chosen, secure, rounds=1)["theta"]
        for name, chosen in (("noisy", noisy), ("exact", asked.model_copy(update={"noise": "central"})))
    )
    expected = clip * (update_multiplier(z, count_noise) if adaptive else z)
    chi_square((found - exact) * len(SIZES), expected * (math.sqrt(5 / 4) if noise == "distributed" else 1))


def test_secret_noise_and_draws_differ_between_runs_and_seeded_ones_do_not(tmp_path: Path) -> None:
    asked = privacy(clip=0.5, noise_multiplier=1.0, noise="distributed")
    found = [
        trained(tmp_path / str(i), "fedavg", asked, SecureAggregation(), rounds=1, seed=seed)["theta"]
        for i, seed in enumerate((1, 1, None, None))
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[2], found[3])
    roster = [f"c{i}" for i in range(200)]
    for sampling in ("poisson", "fixed"):
        secret = PrivateSums(privacy(sampling=sampling), 20, None)
        draw = secret.choice(200, 20)
        assert secret.drawn(roster, draw, "cohort", 1, 1) != secret.drawn(roster, draw, "cohort", 1, 1)
    seeded = PrivateSums(privacy(sampling="poisson"), 20, 3)
    draw = seeded.choice(200, 20)
    assert (
        seeded.drawn(roster, draw, "cohort", 1, 1)
        == seeded.drawn(roster, draw, "cohort", 1, 1)
        != seeded.drawn(roster, draw, "cohort", 2, 1)
    )


def test_noisy_vectors_do_not_wrap_and_coarse_steps_are_rejected() -> None:
    fields, shapes = find_algorithm("fedavg").sums(settings_of("fedavg"))[Update], {"delta_theta": (500,)}
    shapes |= {"steps": (1,), "loss": (1,)}
    rule = ClippedSum(clip=2.0, noise_multiplier=3.0, count_noise=4.0)
    members = 1000
    vector = PrivateVector.create(Update, fields, shapes, SecureAggregation(bits=32), rule, members, 667)
    assert members * (rule.norm + 14 * vector.share) <= (2**31 - 1) * vector.step
    assert vector.share == pytest.approx(3.0 * rule.norm / math.sqrt(667), rel=1e-4)
    values = clipped_values(
        {"delta_theta": np.full(500, 0.1), "steps": np.ones(1), "loss": np.ones(1)}, vector.learned, rule
    )
    one = vector.noisy(values, NoiseSource.seeded(b"0"))
    there = vector.decode(one, members)
    assert np.abs(there["delta_theta"] - 2 / math.sqrt(500)).max() < 7 * vector.share
    assert there["steps"] == pytest.approx(1, abs=1e-4)
    with refusing(ExperimentError, "federation.secure_aggregation.bits", 32, 64):
        PrivateVector.create(Update, fields, shapes, SecureAggregation(bits=32), ClippedSum(1.0, 1e-3), 60000, 40000)


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, None])
def test_poisson_sampling_draws_clients_independently(seed: int | None) -> None:
    rounds, q, roster = 4000, 0.2, [f"c{i}" for i in range(10)]
    private = PrivateSums(privacy(sampling="poisson"), 2, seed)
    draw = private.choice(10, 2)
    taken = np.zeros((rounds, 10))
    for t in range(rounds):
        for client in private.drawn(roster, draw, "cohort", t, 1):
            taken[t, roster.index(client)] = 1
    error = 5 * math.sqrt(q * (1 - q) / rounds)
    assert np.abs(taken.mean(0) - q).max() < error
    together = taken.T @ taken / rounds
    assert np.abs(together[~np.eye(10, dtype=bool)] - q * q).max() < 5 * q / math.sqrt(rounds)
    assert taken.sum(1).var() == pytest.approx(10 * q * (1 - q), rel=0.15)
    assert (taken.sum(1) == 0).mean() == pytest.approx((1 - q) ** 10, abs=0.03)


def test_cohorts_vary_and_an_empty_one_is_a_round_of_noise(tmp_path: Path) -> None:
    asked = privacy(clip=0.5, noise_multiplier=0.1, sampling="poisson")
    run = made(tmp_path, "fedavg", asked, rounds=30, cohort=1)
    run.run()
    sizes = [len(attempt.conversations[0].clients) for attempt in run.loop.journal.attempts]
    assert len(sizes) == 30
    assert {0, 1, 2} <= set(sizes)
    empty = next(attempt for attempt in run.loop.journal.attempts if not attempt.conversations[0].clients)
    assert empty.statistics == {"client_steps": 0.0}
    releases = count_training_releases(run.loop.folder).counts[""]
    assert releases == {sampled("poisson", 5, 1, 0.1): 30}


def test_failed_attempts_are_charged_before_their_cohorts_are_asked(tmp_path: Path) -> None:
    def broken(client: str) -> Any:
        raise DataError(f"{client} has nothing")

    run = made(tmp_path, "fedavg", privacy(noise_multiplier=1.0), cohort=2, load=broken)
    with pytest.raises(QuorumError):
        run.run()
    assert count_training_releases(run.loop.folder).counts[""] == {sampled("fixed", 5, 2, 1.0): 1}


def test_cohorts_too_small_for_secure_sums_are_rejected() -> None:
    private = PrivateSums(privacy(sampling="poisson"), 5, 0, is_secure=True)
    with refusing(ExperimentError, 5, 90, "secure_aggregation", "poisson"):
        private.choice(90, 5)
    assert private.choice(1000, 40).sampling == "poisson"
    assert private.choice(5, 5).sampling == "all"
    # q P(2 of the others): summed over all cohorts by hand
    assert small_cohort_odds(4, 2, 3) == pytest.approx(0.5 * 3 * 0.5**3)


class WithFavourites(FedAvgServer):
    """Server that always selects the first client."""

    def train_round(self, round: Any) -> Any:
        """Draw a cohort that no accounting covers."""
        round.sample(always=[self.setup.roster[0]])
        raise AssertionError


def test_a_method_with_its_own_sampling_is_rejected(tmp_path: Path) -> None:
    method = variant(find_algorithm("fedavg"), server=lambda *about: WithFavourites(find_algorithm("fedavg"), *about))
    settings, data = settings_of("fedavg"), clients(SIZES)
    problem = problem_of(MLP(IMAGE, (8,), 3), data, roster=tuple(c.id for c in data))
    run = federation(tmp_path, method, settings, problem, data, **parts(method, settings, privacy(), None, 5))
    with refusing(ExperimentError, "federation.privacy"):
        run.run()


# --- the adaptive norm ------------------------------------------------------------------------------------------------


def test_the_clipping_norm_finds_a_quantile_of_fixed_norms() -> None:
    """Andrew et al. 2021, Figure 1: from far above and far below, with noise."""
    norms = np.random.default_rng(0).lognormal(0.0, 0.7, 400)
    for quantile, start in ((0.5, 0.01), (0.8, 100.0)):
        asked = privacy(clip=start, noise_multiplier=1.0, adaptive_clip=AdaptiveClip(quantile=quantile))
        private = PrivateSums(asked, 400, seed=5)
        found = []
        for t in range(160):
            rule = private.rule
            bits = {BIT: np.array([rule.bit_weight * (np.sum(norms <= rule.clip) - 200.0)])}
            private.adapt(private.noisy(bits, rule.deviation(), ConversationKey(t, 1, 0, "train"), 0), 400)
            found.append(rule.clip)
        assert np.median(found[-40:]) == pytest.approx(np.quantile(norms, quantile), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["central", "distributed"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(noise: str, tmp_path: Path) -> None:
    secure = None if noise == "central" else SecureAggregation()
    asked = privacy(clip=0.3, noise_multiplier=0.1, noise=noise, adaptive_clip=AdaptiveClip(count_noise=0.5))
    whole = made(tmp_path / "whole", "scaffold", asked, secure, rounds=4)
    whole.run()
    first = made(tmp_path / "part", "scaffold", asked, secure, rounds=2)
    first.run()
    rest = made(tmp_path / "part", "scaffold", asked, secure, rounds=4)
    rest.loop.resume()
    assert float(rest.loop._private.state["clip"]) != asked.clip
    rest.run()
    assert all(torch.equal(rest.state[name], value) for name, value in whole.state.items())
    one, two = (
        (tmp_path / name / "checkpoints" / "round-000004.safetensors").read_bytes() for name in ("whole", "part")
    )
    assert one == two


def test_a_failed_attempt_restores_the_clipping_norm(tmp_path: Path) -> None:
    asked = privacy(clip=0.3, noise_multiplier=1.0, adaptive_clip=AdaptiveClip(count_noise=1.0))
    run = made(tmp_path, "q-fedavg", asked, rounds=1)
    run.loop.server.method = variant(find_algorithm("q-fedavg"), aggregate=_diverges)
    with pytest.raises(QuorumError):
        run.run()
    assert float(run.loop._private.state["clip"]) == 0.3


def _diverges(*about: Any) -> Tensor:
    raise FloatingPointError("infinite")


# --- errors before a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "federation", "key", "facts"),
    [
        ("{name: fedavg}", {}, "algorithm.weighting", ["uniform", "examples"]),
        ("{name: comfedl}", {}, "federation.privacy", ["comfedl", "literal", "normalized"]),
        ("{name: drfa, replace: false, gamma: 0}", {}, "federation.privacy", ["drfa"]),
        ("{name: pefll}", {}, "federation.privacy", ["pefll"]),
        ("{name: afl}", {}, "federation.privacy", ["afl"]),
        (
            "{name: feddyn}", {"adaptive_clip": {"count_noise": 0.1}},
            "federation.privacy.adaptive_clip.count_noise", ["0.1", "0.5"],
        ),
        ("{name: feddyn}", {"min_replies": 2}, "federation.min_replies", ["poisson", "2", "fixed"]),
        ("{name: feddyn}", {"noise": "distributed"}, "federation.privacy.noise", ["secure_aggregation"]),
        ("{name: feddyn}", {"secure_aggregation": {}}, "federation.clients_per_round", ["5", "90", "poisson"]),
    ],
)  # fmt: skip
def test_experiments_that_cannot_be_private_name_the_key(
    algorithm: str, federation: dict[str, Any], key: str, facts: list[str], tmp_path: Path
) -> None:
    secure, least = federation.pop("secure_aggregation", None), federation.pop("min_replies", 1)
    asked = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, **federation}
    tree = {"rounds": 2, "clients_per_round": 5, "privacy": asked, "secure_aggregation": secure, "min_replies": least}
    text = GOOD.replace("{name: fedavg}", algorithm).replace("clients: 4", "clients: 90")
    text = text.replace("partition:", "held_out_fraction: 0, partition:")
    (tmp_path / "bad.yaml").write_text(text.replace("{rounds: 2, clients_per_round: 2}", json.dumps(tree)))
    with refusing(ExperimentError, key, *facts):
        load_experiment(tmp_path / "bad.yaml")


# --- whole runs -------------------------------------------------------------------------------------------------------


def run(root: Path, out: str, **keys: Any) -> fedloom.Run:
    """Run a small private experiment on data in memory."""
    random = np.random.default_rng(0)
    data = {f"c{i}": (random.normal(size=(20, 6)).astype(np.float32), np.arange(20) % 3) for i in range(6)}
    experiment = {
        "name": "private",
        "model": {"name": "mlp", "hidden": [5]},
        "algorithm": {"name": "scaffold", "local": {"steps": 3, "batch_size": 5}},
        "federation": {
            "rounds": 4,
            "clients_per_round": 4,
            "checkpoint_every_s": 0,
            "privacy": {
                "clip": 0.5,
                "noise_multiplier": 0.5,
                "delta": 1e-3,
                "adaptive_clip": {"count_noise": 1.0},
                **keys.pop("privacy", {}),
            },
        },
    }
    made = fedloom.Federated.from_arrays(data, root=root, held_out_fraction=0)
    quiet = {"report": False, "progress": False, "runtime__workers": 0}
    return fedloom.run(experiment, out=root / out, data=made, **{**quiet, **keys})


def state(root: Path, out: str) -> dict[str, Tensor]:
    """Return the tensors of the last checkpoint."""
    return load_file(sorted((root / out / "checkpoints").glob("*.safetensors"))[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("noise", ["central", "distributed"])
@pytest.mark.usefixtures("forks")
def test_workers_resumption_and_replay_give_equal_bits_in_a_simulation(noise: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {}
    if noise == "distributed":
        sums = {"noise": "distributed", "sampling": "fixed"}
        keys = {"privacy": sums, "federation__secure_aggregation": {}}
    done = run(tmp_path, "whole", **keys)
    whole = state(tmp_path, "whole")
    assert float(whole["federation/clip"]) != 0.5
    reported = done.summary["training_privacy"]
    assert (reported["noise"], reported["sums"], reported["unit"]) == ("seed", 4, "clients")
    assert "ControlledUpdate.delta_c" in reported["covers"]
    assert "ControlledUpdate.loss" in reported["does_not_cover"]
    run(tmp_path, "workers", **keys, runtime__workers=2)
    run(tmp_path, "part", **keys, federation__rounds=2)
    run(tmp_path, "part", **keys, resume=True)
    run(tmp_path, "again", **keys, replay=tmp_path / "whole")
    for other in ("workers", "part", "again"):
        found = state(tmp_path, other)
        assert all(torch.equal(found[name], value) for name, value in whole.items()), other
