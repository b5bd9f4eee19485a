"""Audits of trainings that this process breaks on purpose: each break is found, and correct trainings pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import mentions
from torch import Tensor
from vowel_data import vowel_experiment

import fedloom
from fedloom.algorithms import losses
from fedloom.algorithms.batches import TrainBatches
from fedloom.algorithms.client_group import ClientGroup
from fedloom.audits.commands import show_audit
from fedloom.engine.observer import RunObserver
from fedloom.federation.private_sums import Draw, PrivateSums, Values
from fedloom.federation.transport import ConversationKey
from fedloom.reporting.report_audit import audit_parts
from fedloom.reporting.words import audit_verdict
from fedloom.runs.folder import RunFolder

Break = Callable[[pytest.MonkeyPatch], None]

CLAIMS = [4.0, 1.0]


class Notices(RunObserver):
    """Observer that keeps notices, and the events before and after them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def notice(self, text: str) -> None:
        """Keep a notice."""
        self.events.append(text)

    def started(self, experiment: Any, clients: int, location: str) -> None:
        """Note that the training starts."""
        self.events.append("started")


def audited(
    root: Path,
    of: str,
    claim: float,
    *,
    canaries: int = 200,
    seed: int = 0,
    notices: Notices | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """Audit a small training on the fixture of vowels; return ``audit.json``."""
    local = {"steps": 2 if of == "clients" else 5, "lr": 0.05, "momentum": 0.0, "batch_size": 8}
    privacy = {"of": of, "clip": 0.5, "epsilon": claim, "delta": 1e-5}
    settings = vowel_experiment(
        root,
        model={"name": "mlp", "hidden": [100]},
        algorithm={"name": "fedavg", "local": local, "weighting": "uniform"},
        federation={"rounds": 8, "clients_per_round": 3 if of == "clients" else 12, "privacy": privacy},
        evaluation={"every": 100},
        seed=seed + 1,
    )
    out = root / f"audit-{seed}"
    run = fedloom.audit(
        settings, canaries=canaries, of=of, seed=seed, out=out, report=False, progress=notices or Notices(), **changed
    )
    return run.audit


def less_noise_on_clients(part: float) -> Break:
    """Return a break that adds a part of the noise to sums over clients."""
    noisy = PrivateSums.noisy

    def less(self: PrivateSums, values: Values, deviation: float, key: ConversationKey, exchange: int) -> Values:
        return noisy(self, values, max(1e-9, part * deviation), key, exchange)

    return lambda patch: patch.setattr(PrivateSums, "noisy", less)


def less_noise_on_examples(part: float) -> Break:
    """Return a break that adds a part of the noise to sums over examples."""
    noise_for = ClientGroup.noise_for
    return lambda patch: patch.setattr(
        ClientGroup, "noise_for", lambda self, i, total: part * noise_for(self, i, total)
    )


def no_clipping_of_clients(patch: pytest.MonkeyPatch) -> None:
    """Add updates as they are, at the clients and at the aggregator."""
    for module in ("federation.private_sums", "sums.summation"):
        patch.setattr(f"fedloom.{module}.clip_factor", lambda norm, clip: 1.0)
    patch.setattr("fedloom.sums.summation.slack_of", lambda *_: 1e9)


def fixed_cohort(patch: pytest.MonkeyPatch) -> None:
    """Draw the cohort of the first round in every round."""
    drawn = PrivateSums.drawn

    def first(self: PrivateSums, roster: Any, draw: Draw, purpose: str, round: int, attempt: int) -> set[str]:
        return drawn(self, roster, draw, purpose, 1, 1)

    patch.setattr(PrivateSums, "drawn", first)


def clipping_of_batches(patch: pytest.MonkeyPatch) -> None:
    """Clip the mean gradient of a batch to C, and multiply it by the number of examples."""

    def clipped(flat: list[Tensor], counted: Tensor, clip: float) -> list[Tensor]:
        sums = [(counted.to(each)[..., None, :] @ each)[..., 0, :] for each in flat]
        n = counted.sum().clamp(min=1)
        norm = torch.cat([each.reshape(-1) for each in sums]).norm() / n
        return [each * (clip / norm.clamp(min=1e-12)).clamp(max=1) for each in sums]

    patch.setattr(losses, "_clipped", clipped)


def no_clipping_of_examples(patch: pytest.MonkeyPatch) -> None:
    """Add gradients as they are."""
    clipped = losses._clipped
    patch.setattr(losses, "_clipped", lambda flat, counted, clip: clipped(flat, counted, 1e9))


def fixed_batch(patch: pytest.MonkeyPatch) -> None:
    """Take one batch of a client in every step of the training."""

    def first(self: TrainBatches, j: int, expected: int, purpose: str) -> Tensor:
        n = self.sizes[j]
        return (torch.rand(n, generator=torch.Generator().manual_seed(1)) < expected / n).nonzero()[:, 0]

    patch.setattr(TrainBatches, "_sample", first)


def batch_fixed_in_a_round(patch: pytest.MonkeyPatch) -> None:
    """Take the batch of the first step of a round in every step of the round."""
    sample = TrainBatches._sample

    def first(self: TrainBatches, j: int, expected: int, purpose: str) -> Tensor:
        return sample(self, j, expected, f"{purpose.rpartition('/')[0]}/0")

    patch.setattr(TrainBatches, "_sample", first)


def everyone(patch: pytest.MonkeyPatch) -> None:
    """Take all examples of a client in every step."""
    patch.setattr(TrainBatches, "_sample", lambda self, j, expected, purpose: torch.arange(self.sizes[j]))


CLIENTS: dict[str, tuple[Break, str, dict[str, Any]]] = {
    "no noise": (less_noise_on_clients(0), "noise", {}),
    "no noise, all clients": (less_noise_on_clients(0), "noise", {"federation__clients_per_round": 12}),
    "a third of the noise": (less_noise_on_clients(1 / 3), "noise", {}),
    "no clipping": (no_clipping_of_clients, "noise", {}),
    "fixed cohort": (fixed_cohort, "sampling", {}),
}
EXAMPLES: dict[str, tuple[Break, str, dict[str, Any]]] = {
    "no noise": (less_noise_on_examples(0), "noise", {}),
    "no noise, 2 rounds": (less_noise_on_examples(0), "noise", {"federation__rounds": 2}),
    "a third of the noise": (less_noise_on_examples(1 / 3), "noise", {}),
    "clipping per batch": (clipping_of_batches, "noise", {}),
    "no clipping": (no_clipping_of_examples, "noise", {}),
    "fixed batch": (fixed_batch, "sampling", {}),
    "batch fixed in a round": (batch_fixed_in_a_round, "sampling", {}),
    "everyone": (everyone, "sampling", {}),
}
CASES = [("clients", name) for name in CLIENTS] + [("examples", name) for name in EXAMPLES]
CLAIMED = [(of, name, CLAIMS[i % 2]) for i, (of, name) in enumerate(CASES)]
"""Each break with one of the claims, so that every kind of break meets both."""


@pytest.mark.slow
@pytest.mark.sampled(13)
@pytest.mark.parametrize(("of", "name", "claim"), CLAIMED)
def test_each_break_is_found(of: str, name: str, claim: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, test, changed = (CLIENTS if of == "clients" else EXAMPLES)[name]
    broken(monkeypatch)
    found = audited(tmp_path, of, claim, canaries=160, **changed)
    canaries = found["canaries"]
    assert canaries["verdict"] == "failed"
    assert test in canaries["failed_by"]
    assert mentions(audit_verdict(canaries, found["claim"]), "failed")


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("of", ["clients", "examples"])
@pytest.mark.parametrize(("claim", "seed"), [(4.0, 0), (1.0, 1), (1.0, 2)])
def test_a_correct_training_passes(of: str, claim: float, seed: int, tmp_path: Path) -> None:
    found = audited(tmp_path, of, claim, seed=seed, canaries=160)
    assert found["canaries"]["verdict"] == "passed"
    assert found["canaries"]["failed_by"] == []
    assert mentions(audit_verdict(found["canaries"], found["claim"]), "passed")


def test_an_audit_without_power_says_so_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices()
    found = audited(tmp_path, "clients", 1.0, canaries=8, notices=notices, federation__rounds=1)
    told, started = notices.events[:2]
    assert started == "started"
    power = found["canaries"]["power"]
    assert mentions(told, "no power", f"{power['canaries']:,}", "0.9")
    assert found["canaries"]["verdict"] == "no power"
    assert mentions(audit_verdict(found["canaries"], found["claim"]), "no power", f"{power['canaries']:,}")
    run = RunFolder(tmp_path / "audit-0" / "run")
    (part,) = audit_parts(run)
    assert ("verdict", "no power") in part.pairs
    show_audit(run.path)
    assert mentions(capsys.readouterr().out, "Verdict: no power", "noise about", "twice in a row")


@pytest.mark.slow
def test_the_power_is_told_before_the_training(tmp_path: Path) -> None:
    notices = Notices()
    found = audited(tmp_path, "examples", 4.0, canaries=100, notices=notices)
    assert notices.events[1] == "started"
    power = found["canaries"]["power"]
    told = float(re.findall(r"noise of at most ([\d.]+) %", notices.events[0])[0])
    assert told == pytest.approx(100 * power["noise"], abs=5)  # after the training, of the sums that had canaries
