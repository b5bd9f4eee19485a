"""Any ``nn.Module`` as the clients' model: equal bits to the built-in one, and unsupported modules by name."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import tells
from test_local_data import TASK, people
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.experiment import from_shared_json, of
from fedloom.models.factories import FACTORIES
from fedloom.models.module import ModuleModel, remember
from fedloom.models.networks import LeNet
from fedloom.models.registry import ModuleSettings


class Net(nn.Module):
    """LeNet as written by users; the head is registered first, although it is the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc3 = nn.Linear(84, 10)
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2 = nn.Linear(512, 120), nn.Linear(120, 84)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.max_pool2d(self.conv1(x), 2))
        h = F.relu(F.max_pool2d(self.conv2(h), 2)).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(h)))))


def lenet(make: Any = Net) -> ModuleModel:
    return ModuleModel(make, (1, 28, 28), 10, "pixels")


@contextlib.contextmanager
def refused(*facts: object) -> Iterator[None]:
    with pytest.raises(ExperimentError) as error:
        yield
    assert tells(str(error.value), *facts), str(error.value)


def group(*sizes: int) -> ClientGroup:
    random = torch.Generator().manual_seed(2)
    clients = []
    for i, n in enumerate(sizes):
        x, y = torch.randn(n, 1, 28, 28, generator=random), torch.randint(10, (n,), generator=random)
        clients.append(ClientData(f"c{i}", Split(x, y), Split(x, y), Split(x, y), 10))
    return of_clients(clients)


def of_clients(clients: list[ClientData]) -> ClientGroup:
    return ClientGroup(clients, lambda client, purpose: torch.Generator().manual_seed(sum(map(ord, client + purpose))))


def test_lenet_as_a_module_equals_the_built_in_one_to_the_bit() -> None:
    ours, theirs = LeNet((1, 28, 28), 10), lenet()
    assert theirs.layout.entries == ours.layout.entries
    assert theirs.layout.head == ("fc3.weight", "fc3.bias")
    start, x = ours.init(torch.Generator().manual_seed(5)), torch.randn(4, 1, 28, 28)
    assert torch.equal(*(model.logits(start, x) for model in (ours, theirs)))
    features = [model.features(model.layout.leaves(start), x) for model in (ours, theirs)]
    assert torch.equal(*features)
    s = LocalSGD(steps=3, batch_size=8, mask_absent=True)
    ends = [train(model, group(20), start[None], s).theta for model in (ours, theirs)]
    assert torch.equal(*ends)


def test_several_clients_at_once_equal_single_ones() -> None:
    model, s = lenet(), LocalSGD(steps=2, batch_size=8)
    theta = model.init(torch.Generator().manual_seed(1)).expand(2, -1)
    together = train(model, group(12, 20), theta, s).theta
    apart = [train(model, of_clients([client]), theta[:1], s).theta for client in group(12, 20).clients]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-6)


def test_start_of_training() -> None:
    module = lenet()
    first, again, other = (module.init(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    state = torch.get_rng_state()
    module.init(torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())
    net = Net()
    kept = lenet(lambda: copy.deepcopy(net))
    assert torch.equal(kept.init(torch.Generator().manual_seed(1)), kept.init(torch.Generator().manual_seed(2)))


def test_threads_share_a_module_safely() -> None:
    model = lenet()
    thetas = [model.init(torch.Generator().manual_seed(i)) for i in range(4)]
    x = torch.randn(8, 1, 28, 28)
    expected = [model.logits(theta, x) for theta in thetas]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: model.logits(thetas[i % 4], x), range(40)))
    assert all(torch.equal(logits, expected[i % 4]) for i, logits in enumerate(found))


class Squared(nn.Module):
    """Module with its own loss, a shared weight, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.last = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.first(x) * self.scale))

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - F.one_hot(y, 2)).square().sum(1)


def test_a_custom_loss_and_a_shared_layer() -> None:
    model, module = ModuleModel(Squared, (3,), 2, "features"), Squared()
    assert [name for name, _ in model.layout.entries] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    parameters = dict(module.named_parameters())
    assert torch.equal(model.loss(parameters, x, y), module.loss(module(x), y))
    module.loss(module(x), y).sum().backward()
    theta = model.layout.join({n: p.detach() for n, p in parameters.items()}).requires_grad_()
    (found,) = torch.autograd.grad(model.loss(model.layout.split(theta), x, y).sum(), theta)
    assert torch.allclose(found, model.layout.join({n: p.grad for n, p in parameters.items()}))


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(3))
        return self.last(x * self.late)


class Counts(Grows):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(x)


class Noise(Grows):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + torch.randn_like(x))


class WrongLoss(Squared):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().loss(logits, y).mean()


class NoLoss(Squared):
    def loss(self, logits: Tensor) -> Tensor:  # type: ignore[override]
        return logits


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "output"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)),
            ("'1'", "BatchNorm1d", "momentum", "0.1"),
        ),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(5, 2)), ("Sequential", "lazy", "[3, 3]")),
        (Grows, ("Grows", "run time", "late")),
        (Counts, ("Counts", "calls", "constants")),
        (Noise, ("Noise", "random", "evaluation", "torch")),
        (frozen, ("Sequential", "frozen", "requires_grad")),
        (lambda: nn.Linear(3, 5), ("[3, 2]", "[3, 5]")),
        (lambda: nn.Linear(4, 2), ("[3, 3]", "RuntimeError")),
        (lambda: nn.Linear(3, 2).double(), ("float64", "float32")),
        (nn.Identity, ("Identity", "no parameters")),
        (WrongLoss, ("WrongLoss.loss", "[3]", "[]")),
        (NoLoss, ("NoLoss.loss", "TypeError")),
    ],
)
def test_unsupported_modules_are_reported_with_the_reason(make: Any, output: tuple[str, ...]) -> None:
    with refused("model.factory", *output):
        ModuleModel(make, (3,), 2, "features")


def test_finding_the_head_layer() -> None:
    two = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert ModuleModel(lambda: two, (3,), 2, "features").layout.head == ("2.weight", "2.bias")
    with refused("model.head", "'0'"):
        ModuleModel(lambda: two, (3,), 2, "features", head="0")
    with refused("model.head", "'nothing'", "0, 2"):
        ModuleModel(lambda: two, (3,), 2, "features", head="nothing")
    open_end = ModuleModel(lambda: nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2)), (3,), 2, "features")
    assert open_end.layout.head == ()
    assert not open_end.has_features


@pytest.mark.parametrize("method", ["fedper", "knn-per", "fedrod", "pefll"])
def test_methods_accept_a_module_in_memory(method: str, tmp_path: Path) -> None:
    algorithm = {"name": method, **({"embedding": {"network": "mlp"}} if method == "pefll" else {})}
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0.25)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    keys = {"data": data, "model": module, "algorithm": {**algorithm, "local": {"steps": 1}}}
    run = fedloom.run(TASK, out=tmp_path / "run", report=False, progress=False, **keys)
    assert run.models("ann")(torch.randn(2, 3)).shape == (2, 2)
    headless = nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2))
    if method != "pefll":
        with refused("model.name", "linear"):
            fedloom.run(TASK, out=tmp_path / "no", progress=False, **{**keys, "model": headless})
        assert not (tmp_path / "no").exists()


def test_a_module_of_another_process_is_reported_and_can_be_passed_again(tmp_path: Path) -> None:
    from fedloom.models import module as memory

    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    net = nn.Linear(3, 2)
    fedloom.run(TASK, data=data, model=net, out=tmp_path / "run", report=False, progress=False)
    memory._IN_MEMORY.clear()  # as in another process
    with refused("model.factory", "memory:Linear", "another process"):
        fedloom.load(tmp_path / "run").models("ann")
    assert fedloom.load(tmp_path / "run", model=net).models("ann")(torch.zeros(1, 3)).shape == (1, 2)
    with refused("runtime.workers", "0", "memory", "2"):
        fedloom.run(TASK, data=data, model=net, runtime__workers=2, out=tmp_path / "other", progress=False)
    with refused("parallel is 2", "memory"):
        fedloom.sweep(TASK, data=data, model=net, seeds="1-2", parallel=2, out=tmp_path / "sweep", progress=False)


def test_a_run_opens_only_with_the_module_it_trained(tmp_path: Path) -> None:
    def net(activation: type[nn.Module] = nn.ReLU, hidden: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(3, hidden), activation(), nn.Linear(hidden, 2))

    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    keys = {"report": False, "progress": False, "data": data}
    run = fedloom.run(TASK, model=net(), out=tmp_path / "run", **keys)
    x = torch.randn(5, 3)
    answer = run.models("ann")(x)
    for other in (net(nn.Tanh), net(hidden=5), nn.Linear(3, 2)):
        with refused("model", f"memory:{type(other).__name__}", str(run.factory), "same layers"):
            fedloom.load(run.folder, model=other)
    assert torch.equal(run.models("ann")(x), answer)
    assert torch.equal(fedloom.load(run.folder, model=net()).models("ann")(x), answer)  # the run's weights are used
    named = fedloom.run(TASK, out=tmp_path / "named", **keys)
    with refused("model", "memory:Sequential"):
        fedloom.load(named.folder, model=net())


def test_a_factory_is_found_by_name_and_called_by_workers_only_if_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def small(classes, input_shape):\n    return nn.Linear(input_shape[0], classes)\n"
        "def nothing():\n    return 3\n"
        "def fails():\n    raise ValueError('no')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    model = {"name": "module", "factory": "my_models:small"}
    e = of(TASK, data=data, model=model)
    assert e.model.build((3,), 2, "features").layout.size == 8
    for wrong, output in (("nothing", "int"), ("fails", "no"), ("missing", "imported")):
        with refused("model.factory", wrong, output):
            of(TASK, data=data, model={**model, "factory": f"my_models:{wrong}"})
    monkeypatch.delenv(FACTORIES, raising=False)
    with refused("model.factory", "my_models:small", "none", FACTORIES):
        from_shared_json(e.shared_json())
    monkeypatch.setenv(FACTORIES, "a:b, my_models:small")
    assert isinstance(from_shared_json(e.shared_json()).model, ModuleSettings)
    sys.modules.pop("my_models", None)


def test_equal_modules_have_one_name() -> None:
    net = nn.Linear(3, 2)
    assert remember(net) == remember(copy.deepcopy(net))
    assert remember(net) != remember(nn.Linear(3, 2))
    doubled = Squared()
    doubled.scale *= 2  # runs do not store untrained values
    with refused("model", "memory:Squared", "same layers"):
        remember(doubled, remember(Squared()))
    with refused("model", "nn.Module", "int"):
        remember(3)  # type: ignore[arg-type]
