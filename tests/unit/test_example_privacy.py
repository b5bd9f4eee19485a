"""Methods, models and settings that support example privacy, rejected ones, and the counted releases."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_method import LOCAL, METHODS, SIZES, made, ours
from facts import refusing, tells
from federations import CLASSES, IMAGE, Federation, client, clients, made_by
from safetensors.torch import load_file
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.base import Algorithm, find_algorithm
from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.requirements import check_example_privacy
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.experiment import load_experiment
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.module import ModuleModel
from fedloom.models.networks import BatchNormConvNet, LeNet
from fedloom.privacy.examples import ExamplePrivacy, NoisySteps

PLAIN_HEAD = {"fedrod": {"balance": 0.0}}


def settings_of(name: str, **changes: Any) -> Any:
    method = find_algorithm(name.split()[0])
    return method.settings.model_validate(METHODS[name] | PLAIN_HEAD.get(name, {}) | changes)


def protects(name: str) -> bool:
    return find_algorithm(name.split()[0]).example_privacy(settings_of(name)) is None


PROTECTING = [name for name in METHODS if name.split()[0] in ours() and protects(name)]
OTHERS = sorted({name.split()[0] for name in METHODS if name.split()[0] in ours() and not protects(name)})


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES)
    )  # fmt: skip


def model_for(name: str) -> FlatModel | None:
    return ModuleModel(grouped, IMAGE, CLASSES, "pixels") if name == "fedbn" else None


def federation(folder: Path, name: str, data: Sequence[ClientData], how: ExamplePrivacy, **keys: Any) -> Federation:
    keys = {"rounds": 2, **PLAIN_HEAD.get(name, {}), **keys}
    return made(folder, name, model_for(name), data, examples=how, **keys)


# --- methods ----------------------------------------------------------------------------------------------------------


def test_these_methods_support_example_privacy() -> None:
    assert {*PROTECTING} == {
        "apfl", "ditto", "fedadam", "fedavg", "fedavgm", "fedbabu", "fedbn", "feddyn", "fedper", "fedprox", "fedrep",
        "fedrod", "fedsa-lora", "fedyogi", "heurfedamp", "knn-per", "lg-fedavg", "moon", "pfedbayes", "pfedhn",
        "pfedme", "scaffold",
    }  # fmt: skip
    for name in PROTECTING:
        check_example_privacy(find_algorithm(name), settings_of(name))


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_reject_it_with_a_reason(name: str) -> None:
    method = find_algorithm(name)
    reason = method.example_privacy(settings_of(name))
    assert reason.endswith(".")
    with refusing(ExperimentError, "algorithm.name", name, reason):
        check_example_privacy(method, settings_of(name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROTECTING)
def test_everything_sent_follows_from_clipped_gradients(name: str, tmp_path: Path) -> None:
    """With a tiny clipping norm, the server learns the same from other examples, in three rounds."""
    how = ExamplePrivacy(1e-18, 1e-3)
    # Adam would make steps of its rate for any gradient.
    plain = {"optimizer": "gd", "lr_personal": 1e-4, "lr_global": 1e-4} if name == "pfedbayes" else {}
    one, other = (
        federation(tmp_path / str(i), name, data, how, rounds=3, **plain)
        for i, data in enumerate((clients(SIZES), [client(f"c{i}", n, seed=50 + i) for i, n in enumerate(SIZES)]))
    )
    for f in (one, other):
        f.run()
    for key, value in one.state.items():
        torch.testing.assert_close(other.state[key], value, rtol=0, atol=1e-9)
    journals = [(f.loop.folder.path / "journal.jsonl").read_text().splitlines() for f in (one, other)]
    for lines in zip(*journals, strict=True):
        first, second = (json.loads(line)["statistics"] for line in lines)
        assert first == second
        assert "loss" not in first


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROTECTING)
def test_noisy_sums_are_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two rounds of all clients, and in evaluations of a client that does not train."""
    released = Counter[str]()
    noise_for = ClientGroup.noise_for

    def counted(self: ClientGroup, i: int, total: Tensor) -> Tensor:
        released[self.clients[i].id] += 1
        return noise_for(self, i, total)

    monkeypatch.setattr(ClientGroup, "noise_for", counted)
    data, method, s = clients(SIZES), find_algorithm(name), settings_of(name)
    federation(tmp_path, name, data, ExamplePrivacy(0.5, 1.0), unseen=["c2"]).run()
    expected = Counter[str]()
    for c in data[:2]:
        steps = method.noisy_steps(s, len(c.train))
        expected[c.id] = 2 * sum(each.count * each.uses for each in steps)
    evaluations = 2
    searched = method.noisy_steps(s, SIZES[2], personalizing=True)
    if searched:
        expected["c2"] = evaluations * sum(each.count * each.uses for each in searched)
    assert released == expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize("epochs", [False, True])
@pytest.mark.parametrize("name", PROTECTING)
def test_clients_together_are_close_to_one_by_one(name: str, *, epochs: bool, tmp_path: Path) -> None:
    """With epochs some clients finish before others; also for a client that does not train."""
    how, keys = ExamplePrivacy(0.5, 0.1, "fixed"), {}
    if epochs:
        passes = LOCAL | {"steps": None, "epochs": 2}
        keys = {key: passes for key in ("local", "personal", "head") if key in METHODS[name]}
    found = []
    for at_once in (1, 3):
        data = clients((4, 9, 6, 5, 12))
        f = federation(tmp_path / str(at_once), name, data, how, at_once=at_once, unseen=["c0", "c1"], **keys)
        f.run()
        found.append(made_by(f))
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-7)


def test_values_that_are_not_sent_have_no_noise(tmp_path: Path) -> None:
    """Ditto's personal model learns its client's data while the shared one is all noise."""
    data = [client("c0", 12, seed=3), client("c1", 12, seed=4)]
    f = federation(
        tmp_path, "ditto", data, ExamplePrivacy(1e-6, 1.0), rounds=6,
        personal=LOCAL | {"steps": 30, "lr": 0.1}, proximity=0.0,
    )  # fmt: skip
    f.run()
    for c in data:
        personal, shared = (f.predictors[6, c.id][which] for which in ("personal", "global"))
        of_both = [one.log_probabilities(c.train.x) for one in (personal, shared)]
        learned, noise = (float(torch.nn.functional.nll_loss(log_p, c.train.y)) for log_p in of_both)
        assert learned < 0.5
        assert noise > 0.9


class Counting(FedAvg):
    """Method with its own training that does not declare that it protects examples."""

    name = "counting"

    def train(self, model: FlatModel, group: ClientGroup, shared: Tensor, s: Any) -> Trained:
        return train(model, group, shared, s.local)


class Stating(Counting):
    def example_privacy(self, settings: Any) -> str | None:
        return None


class Later(FedProx):
    def train(self, model: FlatModel, group: ClientGroup, theta: Tensor, s: Any) -> Trained:
        return super().train(model, group, theta, s)


class Named(FedAvg):
    name = "named"


def test_a_third_party_method_must_declare_support() -> None:
    for method in (Counting(), Later()):
        with refusing(ExperimentError, "algorithm.name", method.name):
            check_example_privacy(method, method.settings())
    for method in (Stating(), Named()):
        check_example_privacy(method, method.settings())


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("fedavg", {"local": LOCAL | {"clip": 2.0}}, "algorithm.local.clip"),
        ("fedprox", {"local": LOCAL | {"clip_value": 2.0}}, "algorithm.local.clip_value"),
        ("fedrep", {"head": LOCAL | {"clip": 2.0}}, "algorithm.head.clip"),
        ("fedavg", {"local": LOCAL | {"mask_absent": True}}, "algorithm.local.mask_absent"),
        ("scaffold", {"local": LOCAL | {"mask_absent": True}}, "algorithm.local.mask_absent"),
        ("fedrod", {"balance": 1.0}, "algorithm.balance"),
    ],
)
def test_settings_that_reuse_examples_or_clip_twice_are_rejected(name: str, changes: dict[str, Any], key: str) -> None:
    with refusing(ExperimentError, key):
        check_example_privacy(find_algorithm(name), settings_of(name, **changes))


def test_local_only_training_may_clip_and_mask() -> None:
    changes = {"personal": LOCAL | {"clip": 1.0, "mask_absent": True}}
    check_example_privacy(find_algorithm("ditto"), settings_of("ditto", **changes))


# --- models -----------------------------------------------------------------------------------------------------------


def convolutional(norm: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)
        )  # fmt: skip

    return make


class Averaging(nn.Module):
    """Layer that updates a moving average of the examples, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(), 0.1)
        return x


class Joint(nn.Module):
    """Module whose loss of an example depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x.flatten(1))
        return found

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, y, reduction="none") + z.var(0).sum()


class Asking(Joint):
    """Module that reads a value."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z if float(z.detach().sum()) < 1e9 else 2 * z

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (convolutional(nn.BatchNorm2d(4)), ["'1'", "BatchNorm2d", "GroupNorm"]),
        (convolutional(nn.BatchNorm2d(4, track_running_stats=False)), ["'1'", "BatchNorm2d"]),
        (convolutional(Averaging()), ["'1'", "Averaging", "1.mean"]),
        (Joint, ["Joint.loss"]),
    ],
)
def test_models_that_mix_examples_are_rejected_with_the_layer(make: Callable[[], nn.Module], facts: list[str]) -> None:
    model = ModuleModel(make, IMAGE, CLASSES, "pixels")
    model.check_steps()
    with refusing(ExperimentError, "model.factory", *facts):
        model.check_steps(examples=True)


class Recurrent(nn.Module):
    """Module with a layer that vmap cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(16, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.cell(x[:, 0])[0][:, -1])
        return found


@pytest.mark.parametrize("make", [Asking, Recurrent])
def test_examples_are_differentiated_one_by_one_if_vmap_fails(make: Callable[[], nn.Module]) -> None:
    model, data, s = ModuleModel(make, IMAGE, CLASSES, "pixels"), clients((7, 5)), LocalSGD(steps=3, batch_size=4)
    model.check_steps(examples=True)
    assert not model.in_training().vmaps_examples
    theta = torch.stack([model.init(torch.Generator().manual_seed(i)) for i in range(2)])
    data = [ClientData(c.id, Split(c.train.x.float(), c.train.y), c.test, c.test, c.classes) for c in data]

    def group(*members: ClientData) -> ClientGroup:
        keyed = lambda client, purpose: generator(1, purpose, client, 1)  # noqa: E731
        return ClientGroup(members, keyed, round=1, examples=ExamplePrivacy(0.2, 1e-9))

    together = train(model, group(*data), theta, s).theta
    for i, c in enumerate(data):
        alone = train(model, group(c), theta[i : i + 1], s).theta
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-6)
    # One step over all examples, against autograd.
    leaves, c = model.layout.leaves(theta[0]), data[0]
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for i in range(len(c.train)):
        own = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        loss = nn.functional.cross_entropy(model.forward(own, c.train.x[i : i + 1]), c.train.y[i : i + 1])
        found = torch.autograd.grad(loss, [*own.values()])
        factor = min(1.0, 0.2 / float(torch.cat([part.flatten() for part in found]).norm()))
        for name, part in zip(own, found, strict=True):
            total[name] += factor * part
    one = LocalSGD(steps=1, batch_size=7, lr=1.0, momentum=0.0)
    moved = train(model, group(c), theta[:1], one).theta - theta[:1]
    torch.testing.assert_close(moved[0], -model.layout.join(total) / 7, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Dropout(0.5), nn.LocalResponseNorm(2), nn.Identity()]
)
def test_models_that_treat_examples_separately_pass(norm: nn.Module) -> None:
    model = ModuleModel(convolutional(norm), IMAGE, CLASSES, "pixels")
    model.check_steps(examples=True)
    if not isinstance(norm, nn.InstanceNorm2d):  # the gradient of a bias before it is of rounding alone
        model.check_steps(examples=True, clients=4)


def test_built_in_networks() -> None:
    LeNet(IMAGE, CLASSES).check_steps(examples=True)
    with refusing(ExperimentError, "model.norm", "GroupNorm"):
        BatchNormConvNet(IMAGE, [3], [], CLASSES).check_steps(examples=True)


# --- experiments ------------------------------------------------------------------------------------------------------

OWN = """\
name: own
data: {own: {kind: pixels, input_shape: [1, 16, 16], classes: [a, b, c], normalization: {mean: [0.5], std: [0.2]}}}
model: {name: vgg, channels: [3]}
algorithm: {name: fedavg}
federation:
  rounds: 2
  privacy: {of: examples, clip: 1.0, noise_multiplier: 1.0, delta: 1e-5}
"""


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("fedavg", "q-fedavg", ["line 4, algorithm.name: ", "q-fedavg", "losses"]),
        ("channels: [3]", "channels: [3], norm: batch", ["line 3, model.norm: ", "norm: none"]),
        ("{name: fedavg}", "{name: fedavg, local: {steps: 2, clip: 1.0}}", ["algorithm.local.clip: ", "null"]),
        ("{name: vgg, channels: [3]}", "{name: resnet18}", ["line 3, model", "BatchNorm2d"]),
        (", normalization: {mean: [0.5], std: [0.2]}", "", ["line 2, data.own.normalization: ", "mean", "measured"]),
    ],
)
def test_invalid_experiments_are_rejected_at_the_line_of_the_key(
    tmp_path: Path, old: str, new: str, facts: list[str]
) -> None:
    (tmp_path / "own.yaml").write_text(OWN.replace(old, new))
    with pytest.raises(ExperimentError) as error:
        load_experiment(tmp_path / "own.yaml")
    assert tells(str(error.value), *facts)
    without = "\n".join(line for line in OWN.replace(old, new).splitlines() if "privacy:" not in line)
    (tmp_path / "own.yaml").write_text(without)
    load_experiment(tmp_path / "own.yaml")


def people(n: int = 3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    found = {}
    for i in range(n):
        x = random.normal(size=(40, 6)).astype(np.float32)
        found[f"p{i}"] = (x, np.array(["no", "yes"])[(x[:, 0] > 0).astype(int)])
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_run_protects_examples_for_any_number_of_processes(tmp_path: Path) -> None:
    experiment = {
        "name": "noisy",
        "data": fedloom.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0),
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "fedavg", "local": {"steps": 4, "batch_size": 8, "lr": 0.2}},
        "federation": {
            "rounds": 3, "clients_per_round": 3,
            "privacy": {"of": "examples", "clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-3},
        },
    }  # fmt: skip
    quiet = {"report": False, "progress": False}
    found = []
    for name, keys in {"here": {}, "workers": {"runtime__workers": 2}, "less": {"noise": 0.4}}.items():
        privacy = {**experiment["federation"]["privacy"], "noise_multiplier": keys.pop("noise", 0.5)}  # type: ignore[index]
        made = {"runtime__workers": 0, "federation__privacy": privacy, **quiet, **keys}
        folder = fedloom.run(experiment, out=tmp_path / name, **made).folder  # type: ignore[arg-type]
        found.append(load_file(sorted((folder / "checkpoints").glob("*.safetensors"))[-1]))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert all(line["train"]["loss"] is None for line in lines)
        assert lines[-1]["client_steps"] == 3 * 3 * 4
    assert torch.equal(found[0]["theta"], found[1]["theta"])
    assert not torch.equal(found[0]["theta"], found[2]["theta"])


# --- counting ---------------------------------------------------------------------------------------------------------


def test_counting_noisy_steps_of_a_visit() -> None:
    def found(name: str, examples: int = 30, *, personalizing: bool = False, **changes: Any) -> tuple[NoisySteps, ...]:
        method: Algorithm = find_algorithm(name)
        return method.noisy_steps(settings_of(name, **changes), examples, personalizing=personalizing)

    assert found("fedavg") == found("scaffold") == (NoisySteps(3, 3),)
    assert found("fedavg", local={"epochs": 2, "batch_size": 3, "accumulate": 2}) == (NoisySteps(6, 10),)
    assert found("fedrep", head=LOCAL | {"batch_size": 6}) == (NoisySteps(6, 3), NoisySteps(3, 3))
    assert found("ditto", personal=LOCAL | {"steps": 50}) == (NoisySteps(3, 3),)
    assert found("pfedme") == (NoisySteps(3, 2, 2),)
    assert found("pfedbayes", samples=4) == (NoisySteps(3, 3, 4),)
    assert found("fedavg", personalizing=True, personalize_steps=5) == ()
    assert found("pfedhn", personalizing=True, personalize_exchanges=7) == (NoisySteps(3, 21),)


def test_personalizing_a_trained_client_makes_no_noisy_steps(tmp_path: Path) -> None:
    """pFedHN only searches embeddings of new clients: 4 rounds of 3 steps count, but not the 2 evaluations."""
    pytest.importorskip("dp_accounting")
    experiment = {
        "name": "searching",
        "data": fedloom.Federated.from_arrays(people(4), root=tmp_path / "data", held_out_fraction=0.25),
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "pfedhn", "local": {"steps": 3, "batch_size": 8}, "personalize_exchanges": 1},
        "federation": {
            "rounds": 4, "clients_per_round": 3,
            "privacy": {"of": "examples", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3},
        },
        "evaluation": {"every": 4},
    }  # fmt: skip
    quiet = {"report": False, "progress": False, "runtime__workers": 0}
    run = fedloom.run(experiment, out=tmp_path / "run", **quiet)  # type: ignore[arg-type]
    assert run.summary["training_privacy"]["sums"] == 12
