"""FGDRO-KL and its Adam-type steps against plain PyTorch (arXiv 2410.06369)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import refusing
from federations import clients, close, federation, mean_loss, setup
from pydantic import ValidationError

from fedloom import experiment as experiments
from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG
from fedloom.algorithms.fgdro import FGDRO_KL, FGDROSettings, RobustUpdate
from fedloom.data.federated import ClientData
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL: dict[str, Any] = {"steps": 4, "batch_size": 3, "lr": 0.02}
RATES = {"beta_u": 0.3, "beta_v": 0.2, "beta_m": 0.4, "beta_q": 0.05}


def fgdro(**changes: Any) -> FGDROSettings:
    return FGDROSettings.model_validate({"local": LOCAL, "lambda_kl": 0.5} | RATES | changes)


def visit(
    p: Setup, s: FGDROSettings, c: ClientData, state: dict[str, Any], u: float | None, t: int
) -> tuple[dict[str, Any], float]:
    """Run one client's local steps with v as is: a mean of exponentials, without normalization."""
    w, v, m, q = (state[name] for name in "wvmq")
    for index in batches(len(c.train), 3, 4, generator(SEED, "train/train", c.id, t)):
        leaf = w.clone().requires_grad_()
        loss = mean_loss(p.model.logits(leaf, c.train.x[index]), c.train.y[index])
        (g,) = torch.autograd.grad(loss, leaf)
        f = loss.item()
        u = f if u is None else (1 - s.beta_u) * u + s.beta_u * f
        e = math.exp(u / s.lambda_kl)
        v = e if v is None else (1 - s.beta_v) * v + s.beta_v * e
        h = e / v * g + 2 * s.local.lambda_theta * w
        m = h if m is None else (1 - s.beta_m) * m + s.beta_m * h
        q = h**2 if q is None else (1 - s.beta_q) * q + s.beta_q * h**2
        w = w - s.local.lr * (m if s.optimizer == "momentum" else m / (q.sqrt() + s.eps))
    assert u is not None
    return {"w": w, "v": v, "m": m, "q": q}, u


@pytest.mark.usefixtures("each_task")
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_rounds_follow_the_three_moving_averages(tmp_path: Path, optimizer: Any) -> None:
    s, p, data = fgdro(optimizer=optimizer, local=LOCAL | {"lambda_theta": 0.01}), setup(), clients(SIZES)
    run = federation(tmp_path, FGDRO_KL, s, p, data, rounds=4, cohort=2)
    state: dict[str, Any] = {"w": run.state["theta"], "v": None, "m": None, "q": None}
    kept: dict[str, float] = {}
    run.run()
    for t, attempt in enumerate(run.loop.journal.counted(), start=1):
        (trained,) = attempt.conversations
        ends = []
        for name in trained.clients:
            end, kept[name] = visit(p, s, data[int(name[1:])], state, kept.get(name), t)
            ends.append(end)
        state = {name: sum(end[name] for end in ends) / len(ends) for name in "wvmq"}
        if t == 1:  # before v exists, the logarithms are averaged
            state["v"] = math.exp(sum(math.log(end["v"]) for end in ends) / len(ends))
    close(run.state["theta"], state["w"])
    moments = [state["m"]] if optimizer == "momentum" else [state["m"], state["q"]]
    close(run.state["moments"], torch.stack(moments))
    assert float(run.state["value"]) == pytest.approx(s.lambda_kl * math.log(state["v"]), abs=1e-12)
    assert len(kept) == 3  # every client was drawn, some repeatedly


def test_a_large_lambda_without_momentum_gives_fedavg(tmp_path: Path) -> None:
    """All weights are then 1, and the objective is the mean loss."""
    s = fgdro(optimizer="momentum", lambda_kl=1e9, beta_m=1.0)
    average = FEDAVG.settings.model_validate({"local": LOCAL | {"momentum": 0.0}, "weighting": "uniform"})
    mine, avg = (
        federation(tmp_path / m.name, m, settings, setup(), clients(SIZES), rounds=3)
        for m, settings in ((FGDRO_KL, s), (FEDAVG, average))
    )
    mine.run()
    avg.run()
    close(mine.state["theta"], avg.state["theta"], atol=1e-8)


def test_very_different_losses_do_not_overflow(tmp_path: Path) -> None:
    """exp(f/λ) itself overflows any float here."""
    run = federation(tmp_path, FGDRO_KL, fgdro(lambda_kl=1e-3), setup(), clients(SIZES), rounds=2)
    run.run()
    assert run.state["theta"].isfinite().all()
    assert run.state["value"].isfinite().all()


def test_settings_and_declared_properties() -> None:
    for keys in ({"lambda_kl": 0}, {"beta_u": 0}, {"beta_v": 1.5}, {"local": {"epochs": 1}}):
        with pytest.raises(ValidationError):
            fgdro(**keys)
    assert set(FGDRO_KL.sums(fgdro())[RobustUpdate]) == {f.name for f in RobustUpdate.fields()}
    assert FGDRO_KL.noisy_sums_suffice(fgdro())
    assert FGDRO_KL.example_privacy(fgdro())
    assert FGDRO_KL.requires_fixed_population(fgdro()) is None
    assert fgdro(optimizer="momentum").adaptation.optimizer == "sgd"
    assert fgdro(local=LOCAL | {"mask_absent": True}).adaptation.mask_absent


def test_adam_needs_secure_sums_of_64_bits() -> None:
    """At 32 bits q is 0 for gradients below about 3e-4, and the clients' second round diverges."""
    vowel = Path(__file__).parents[2] / "experiments" / "vowel.yaml"

    def made(optimizer: str, bits: int) -> int:
        method = f"algorithm={{name: fgdro-kl, optimizer: {optimizer}}}"
        e = experiments.of(vowel, [method, f"federation.secure_aggregation={{bits: {bits}}}"])
        return e.federation.secure_aggregation.bits

    assert [made("adam", 64), made("momentum", 64), made("momentum", 32)] == [64, 64, 32]
    with refusing(ExperimentError, "federation.secure_aggregation.bits", "64", "32"):
        made("adam", 32)
