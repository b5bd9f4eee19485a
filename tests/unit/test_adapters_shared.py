"""FedAvg of LoRA adapters and FedSA-LoRA against loops of peft's own module and torch.optim (arXiv 2410.01463)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import refusing
from federations import CLASSES, IMAGE, Federation, answers_as_alone, clients, federation, setup
from lazy import lazy_or_skip
from torch import Tensor, nn

from fedloom.algorithms.base import Algorithm
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, PersonalizeRequest, SharedModel
from fedloom.algorithms.fedsa_lora import FEDSA_LORA
from fedloom.data.federated import ClientData
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.module import ModuleModel
from fedloom.models.networks import MLP

peft = lazy_or_skip("peft")

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
EPOCHS = 3


def net(*adapters: str) -> nn.Module:
    """Return a frozen body with adapters, and a trained head."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        base = nn.Sequential(nn.Flatten(), nn.Linear(256, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
        base.append(nn.Linear(5, CLASSES))
        config = peft.LoraConfig(r=2, target_modules=["1", "3"], modules_to_save=["5"])
        made = peft.get_peft_model(base, config, adapter_name=adapters[0])
        for name in adapters[1:]:
            made.add_adapter(name, peft.LoraConfig(r=2, target_modules=["1", "3"]))
        made.base_model.set_adapter(list(adapters))
    return made  # type: ignore[no-any-return]


def one() -> nn.Module:
    return net("default")


def two() -> nn.Module:
    return net("shared", "own")


def model(factory: Callable[[], nn.Module]) -> ModuleModel:
    """Return the module as a model whose frozen parameters are float64, like everything in these federations."""
    m = ModuleModel(factory, IMAGE, CLASSES, "pixels")
    for p in m._module.parameters():
        p.data = p.data.double()
    return m


def trained(
    made: nn.Module, named: dict[str, Tensor], c: ClientData, steps: int, random: torch.Generator, only: str = ""
) -> dict[str, Tensor]:
    """Return the parameters after SGD with momentum by torch.optim; ``only`` trains those with this in their names."""
    made = made.double().train()
    made.load_state_dict(named, strict=False)
    optimizer = torch.optim.SGD([p for n, p in made.named_parameters() if n in named and only in n], 0.05, 0.9)
    for index in batches(len(c.train), 3, steps, random):
        optimizer.zero_grad()
        F.cross_entropy(made(c.train.x[index]), c.train.y[index]).backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in made.named_parameters() if n in named}


def run(folder: Path, method: Algorithm, m: ModuleModel, **keys: Any) -> Federation:
    s = method.settings.model_validate({"local": LOCAL} | keys)
    method.check_model(s, m)
    f = federation(folder, method, s, setup(m), clients(SIZES), rounds=2, unseen=["c2"])
    f.start = f.state["theta"].clone()
    f.run()
    return f


def named(m: ModuleModel, vector: Tensor, kept: str) -> dict[str, Tensor]:
    """Return the sent vector by name."""
    entries = [(name, shape) for name, shape in m.layout.entries if not kept or kept not in name]
    parts = torch.split(vector, [torch.Size(shape).numel() for _, shape in entries])
    return {name: part.view(shape) for (name, shape), part in zip(entries, parts, strict=True)}


def loop(factory: Any, start: dict[str, Tensor], kept: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Run two rounds; return the averaged parameters, and each client's own."""
    data, shared = clients(SIZES), start
    first = {n: p.detach().double() for n, p in factory().named_parameters() if kept and kept in n and p.requires_grad}
    own = {c.id: first for c in data}
    weights = torch.tensor(SIZES[:2], dtype=torch.float64)
    for t in (1, 2):
        ends = []
        for c in data[:2]:
            steps, random = 2 * (len(c.train) // 3), generator(SEED, "train/train", c.id, t)
            ends.append(trained(factory(), {**shared, **own[c.id]}, c, steps, random))
            own[c.id] = {name: ends[-1][name] for name in first}
        shared = {name: sum(w * e[name] for w, e in zip(weights, ends, strict=True)) / weights.sum() for name in shared}
    return shared, own


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_fedavg_of_adapters_equals_a_plain_loop_over_the_module(tmp_path: Path) -> None:
    m = model(one)
    assert m.layout.size == 2 * (256 + 6) + 2 * (6 + 5) + 5 * CLASSES + CLASSES  # of 1 640 parameters of the base
    f = run(tmp_path, FEDAVG, m, personalize_steps=3)
    shared, _ = loop(one, named(m, f.start, ""), "")
    same(f.state["theta"], m.layout.join(shared))
    for c in clients(SIZES):
        tuned = trained(one(), shared, c, 3, generator(SEED, "evaluate/fine-tune", c.id, 2))
        same(f.predictors[2, c.id]["personal"].tensors()["theta"], m.layout.join(tuned))
        same(f.predictors[2, c.id]["global"].tensors()["theta"], m.layout.join(shared))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "keys", "kept"), [(one, {}, "lora_B"), (two, {"local_parameters": ["*.own.*"]}, ".own.")]
)
def test_named_parameters_stay_with_clients_and_the_others_are_averaged(
    tmp_path: Path, factory: Any, keys: dict[str, Any], kept: str
) -> None:
    """B of one adapter; of two adapters that are added, one is shared, and one is the client's own."""
    m = model(factory)
    f = run(tmp_path, FEDSA_LORA, m, personalize_epochs=EPOCHS, **keys)
    assert 0 < len(f.start) < m.layout.size
    shared, own = loop(factory, named(m, f.start, kept), kept)
    same(f.state["theta"], torch.cat([part.flatten() for part in shared.values()]))  # nothing else is ever sent
    for c in clients(SIZES):
        expected = {**shared, **own[c.id]}
        if c.id == "c2":
            random = generator(SEED, "evaluate/personalize", c.id, 2)
            expected = trained(factory(), expected, c, EPOCHS * (len(c.train) // 3), random, only=kept)
        same(f.predictors[2, c.id]["personal"].tensors()["theta"], m.layout.join(expected))
    half = FEDSA_LORA.client(FEDSA_LORA.settings(personalize_epochs=EPOCHS, local=LOCAL, **keys), setup(m))
    assert half.stateful
    assert half.personalization_steps("personal", 6) == 2 * EPOCHS


def test_a_batch_of_clients_replies_as_single_clients() -> None:
    p = setup(MLP(IMAGE, [5], CLASSES))
    s = FEDSA_LORA.settings.model_validate({"local": LOCAL, "local_parameters": ["*bias"], "personalize_epochs": 1})
    server = FEDSA_LORA.server(s, p, torch.Generator().manual_seed(1))
    theta = server.state["theta"]
    opening, ask = SharedModel(theta), PersonalizeRequest(theta)
    answers_as_alone(FEDSA_LORA.client(s, p), clients(SIZES), opening, ask)


@pytest.mark.parametrize(
    ("patterns", "reported"),
    [(("*lora_B*",), ("lora_B", "peft")), (("*bias", "*head*"), ("*head*",)), (("*",), ("shared",))],
)
def test_patterns_without_kept_or_shared_parameters_are_rejected(patterns: tuple[str, ...], reported: Any) -> None:
    m = MLP(IMAGE, [5], CLASSES)
    with refusing(ExperimentError, m.layout.entries[0][0], *reported) as error:
        FEDSA_LORA.check_model(FEDSA_LORA.settings(local_parameters=patterns), m)
    assert error.value.key == "algorithm.local_parameters"
