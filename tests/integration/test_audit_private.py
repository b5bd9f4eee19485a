"""Audits of private trainings: the bound from canaries stays below the claim, and exceeds it without the noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vowel_data import vowel_experiment

import fedloom

UNIFORM, PLAIN = {"weighting": "uniform"}, {"local": {"steps": 2, "lr": 0.05}}
LOCAL = {"steps": 2, "lr": 0.05, "momentum": 0.0}
CLIENTS = {"clip": 0.5, "noise_multiplier": 4.0, "delta": 1e-5}


def audited(root: Path, seed: int, privacy: dict[str, Any] | None, **changed: Any) -> dict[str, Any]:
    """Results of an audit of a small training on the fixture of vowels."""
    of = "clients" if privacy is None else privacy.get("of", "clients")
    sections = {
        "model": {"name": "mlp", "hidden": [100]},
        "algorithm": {"name": "fedavg", **UNIFORM, "local": LOCAL},
        "federation": {"rounds": 3, "clients_per_round": 12, "privacy": privacy},
        "evaluation": {"every": 100},
        "seed": seed + 1,
    }
    settings = vowel_experiment(root, **(sections | changed))
    out = root / f"audit-{seed}-{of}-{0 if privacy is None else privacy['noise_multiplier']}"
    run = fedloom.audit(settings, canaries=150, of=of, seed=seed, out=out, report=False, progress=False)
    return run.audit


def check_bounds(root: Path, seeds: range) -> tuple[list[float], list[str]]:
    """Check the bounds of some trainings; return the estimates as fractions of their claims, and the verdicts."""
    estimates, verdicts = [], []
    for seed in seeds:
        found = audited(root, seed, CLIENTS)
        assert found["claim"]["of"] == "clients"
        assert found["canaries"]["norm"] == 5.0  # ten clipping norms, which must be clipped
        assert found["canaries"]["epsilon"] <= found["claim"]["epsilon"] < found["canaries"]["largest_bound"]
        estimates.append(found["canaries"]["normal_estimate"]["epsilon"] / found["claim"]["epsilon"])
        verdicts.append(found["canaries"]["verdict"])
    return estimates, verdicts


@pytest.mark.slow
def test_the_bound_stays_below_the_claim_of_private_training(tmp_path: Path) -> None:
    _, verdicts = check_bounds(tmp_path, range(1))
    assert verdicts == ["passed"]


@pytest.mark.exhaustive
def test_the_bound_stays_below_the_claim_in_8_trainings(tmp_path: Path) -> None:
    estimates, verdicts = check_bounds(tmp_path, range(8))
    assert sum(estimates) / 8 == pytest.approx(1, rel=0.4)
    assert verdicts.count("failed") <= 2  # more happen with a probability of 0.6 %, if one in 20 fails
    assert verdicts.count("no power") == 0


@pytest.mark.slow
def test_the_bound_exceeds_a_claim_without_its_noise(tmp_path: Path) -> None:
    claim = audited(tmp_path, 0, CLIENTS)["claim"]
    found = audited(tmp_path, 0, {**CLIENTS, "noise_multiplier": 1e-6})
    assert found["canaries"]["epsilon"] > claim["epsilon"]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "settings"), [("scaffold", PLAIN), ("fedrep", UNIFORM), ("fedadam", UNIFORM)])
def test_other_methods_keep_their_claims(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    found = audited(tmp_path, 1, CLIENTS, algorithm={"name": method, "local": LOCAL, **settings})
    assert found["canaries"]["epsilon"] <= found["claim"]["epsilon"]


@pytest.mark.slow
def test_noise_shares_under_secure_aggregation_keep_the_claim(tmp_path: Path) -> None:
    federation = {
        "rounds": 2, "clients_per_round": 12, "secure_aggregation": {},
        "privacy": {**CLIENTS, "noise": "distributed"},
    }  # fmt: skip
    found = audited(tmp_path, 2, {**CLIENTS}, federation=federation)
    assert found["canaries"]["epsilon"] <= found["claim"]["epsilon"]


@pytest.mark.slow
def test_example_privacy_hides_canary_examples(tmp_path: Path) -> None:
    privacy = {"of": "examples", "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-4}
    local = {"steps": 20, "lr": 0.2, "momentum": 0.0, "batch_size": 8}
    changed = {"algorithm": {"name": "fedavg", "local": local}}
    found = audited(tmp_path, 3, privacy, **changed)
    assert found["claim"]["of"] == "examples"
    assert found["canaries"]["epsilon"] <= found["claim"]["epsilon"]
