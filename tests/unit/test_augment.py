"""Augmentation of training images against torchvision applied image by image."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import refusing, tells
from federations import CLASSES, IMAGE
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_bad_settings import GOOD
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.core.draws import drawing_from
from fedloom.data.augment import Augmentation, augmentation, check_augment, describe_transforms, made
from fedloom.data.federated import ClientData, Normalization, Split, standardize
from fedloom.data.spec import DataSpec, InputSpec
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import load_experiment
from fedloom.experiment.loading import of_run
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP

v2 = pytest.importorskip("torchvision.transforms.v2")

MODEL = MLP(IMAGE, [5], CLASSES)
SHAPE = Normalization((0.3,), (0.2,))
CROP_AND_FLIP = [{"RandomCrop": {"size": 16, "padding": 3}}, "RandomHorizontalFlip"]
S = LocalSGD(steps=5, batch_size=4, lr=0.1)


def pixels(n: int, seed: int = 0, shape: tuple[int, ...] = IMAGE) -> Tensor:
    return torch.randint(256, (n, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def normalized(x: Tensor, about: Normalization) -> Tensor:
    """Return standardized pixels."""
    return standardize(x, InputSpec("pixels", tuple(x.shape[1:]), about))


def client(id: str, n: int, seed: int = 0, change: Callable[[Tensor], Tensor] = lambda x: x) -> ClientData:
    part = Split(normalized(change(pixels(n, seed)), SHAPE), torch.arange(n) % CLASSES)
    return ClientData(id, part, part, part, CLASSES)


def group(data: Sequence[ClientData], described: Sequence[Any]) -> ClientGroup:
    keyed = lambda c, purpose: generator(0, purpose, c, 1)  # noqa: E731
    return ClientGroup(data, keyed, augment=augmentation(described, SHAPE))


def start(g: int) -> Tensor:
    return torch.stack([MODEL.init(torch.Generator().manual_seed(i), torch.float32) for i in range(g)])


@given(mean=st.floats(0, 1), std=st.floats(1e-3, 10))
def test_pixels_are_recovered_exactly(mean: float, std: float) -> None:
    about = Normalization((mean, 0.5), (std, 0.25))
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 2, 16, 16)
    assert torch.equal(Augmentation([], about).pixels(normalized(x, about)), x)


def test_each_image_is_augmented_by_its_own_draws_as_in_torchvision() -> None:
    x, transforms = pixels(64), v2.Compose([v2.RandomCrop(16, padding=3), v2.RandomHorizontalFlip()])
    augment = augmentation(CROP_AND_FLIP, SHAPE)
    assert augment is not None
    found = augment(normalized(x, SHAPE), torch.Generator().manual_seed(3))
    with drawing_from(torch.Generator().manual_seed(3)):
        expected = torch.stack([transforms(image) for image in x])
    assert torch.equal(found, normalized(expected, SHAPE))
    same = (found == normalized(x, SHAPE)).flatten(1).all(1)
    assert 0 <= int(same.sum()) < 10
    flipped = augmentation(["RandomHorizontalFlip"], SHAPE)
    assert flipped is not None
    changed = (flipped(normalized(x, SHAPE), torch.Generator()) != normalized(x, SHAPE)).flatten(1)
    assert 15 < int(changed.any(1).sum()) < 49  # some are changed, and some are not


def test_augmenting_every_image_equals_training_on_transformed_data_to_the_bit() -> None:
    """Compare a flip with probability 1; with probability 0 nothing changes."""
    always, never = ({"RandomHorizontalFlip": {"p": p}} for p in (1.0, 0.0))
    c, mirrored = client("c0", 11), client("c0", 11, change=lambda x: x.flip(3))
    assert torch.equal(
        train(MODEL, group([c], [always]), start(1), S).theta, train(MODEL, group([mirrored], []), start(1), S).theta
    )
    plain = train(MODEL, group([c], []), start(1), S).theta
    assert torch.equal(train(MODEL, group([c], [never]), start(1), S).theta, plain)
    assert not torch.equal(train(MODEL, group([c], CROP_AND_FLIP), start(1), S).theta, plain)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("length", [{"steps": 5}, {"epochs": 2, "steps": None}], ids=["steps", "epochs"])
def test_stacked_clients_are_augmented_as_single_ones(length: dict[str, Any], accumulate: int) -> None:
    s = LocalSGD.model_validate({"batch_size": 4, "lr": 0.1, "accumulate": accumulate, **length})
    data, theta = [client(f"c{i}", n, i) for i, n in enumerate((11, 3, 6, 1))], start(4)
    together = train(MODEL, group(data, CROP_AND_FLIP), theta, s)
    for i, c in enumerate(data):
        alone = train(MODEL, group([c], CROP_AND_FLIP), theta[i : i + 1], s)
        torch.testing.assert_close(together.theta[i], alone.theta[0], rtol=0, atol=1e-5)


def test_augmentation_neither_uses_nor_advances_other_generators() -> None:
    c = client("c0", 11)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    once = train(MODEL, group([c], CROP_AND_FLIP), start(1), S).theta
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(train(MODEL, group([c], CROP_AND_FLIP), start(1), S).theta, once)


def test_evaluated_examples_are_not_augmented() -> None:
    c = client("c0", 11)
    local = LocalTrainer(MODEL, group([c], [{"RandomHorizontalFlip": {"p": 1.0}}]))
    (piece,) = local.everything()
    assert torch.equal(piece.x, c.train.x)
    drawn = next(local.batches(11, [1], "loss"))
    plain = next(local.batches(11, [1], "loss", augmented=False))
    assert torch.equal(drawn.x, plain.x.flip(3))
    assert torch.equal(drawn.y, plain.y)


# --- whole runs -------------------------------------------------------------------------------------------------------


def clients(shape: tuple[int, ...] = (3, 12, 12)) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {name: (pixels(30, i, shape).numpy(), np.arange(30) % 3) for i, name in enumerate("abc")}


EXPERIMENT: dict[str, Any] = {
    "name": "augmented",
    "model": {"name": "mlp", "hidden": [6]},
    "algorithm": {
        "name": "fedavg",
        "personalize_steps": 2,
        "local": {
            "epochs": 1, "batch_size": 4, "accumulate": 2, "lr": 0.01, "optimizer": "adamw", "weight_decay": 0.1,
            "schedule": {"name": "cosine", "rounds": 4, "warmup_rounds": 1},
        },
    },
    "federation": {"rounds": 4, "clients_per_round": 2, "checkpoint_every_s": 0},
    "evaluation": {"every": 2},
}  # fmt: skip


def federated(root: Path, **keys: Any) -> fedloom.Federated:
    return fedloom.Federated.from_arrays(clients(), root=root, held_out_fraction=0, **keys)


def run(root: Path, out: str, *, data: fedloom.Federated | None = None, **keys: Any) -> fedloom.Run:
    data = federated(root) if data is None else data
    quiet = {"report": False, "progress": False, "runtime__workers": 0}
    return fedloom.run(EXPERIMENT, out=root / out, data=data, **{**quiet, **keys})


def final(root: Path, out: str) -> dict[str, Any]:
    folder = root / out
    state = load_file(sorted((folder / "checkpoints").glob("*.safetensors"))[-1])
    summary = json.loads((folder / "summary.json").read_text())
    return {"state": {k: v.tolist() for k, v in state.items()}, "seen": summary["seen"], "global": summary["global"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forks")
def test_results_are_equal_for_any_number_of_workers_on_resume_and_on_replay(tmp_path: Path) -> None:
    """Combine random changes, an optimizer with a state, a schedule and averaged mini-batches."""
    keys = {"augment": [v2.RandomCrop(12, padding=2), v2.RandomHorizontalFlip(), v2.RandomErasing()]}
    run(tmp_path, "whole", **keys)
    whole = final(tmp_path, "whole")
    run(tmp_path, "workers", **keys, runtime__workers=2)
    assert final(tmp_path, "workers") == whole
    run(tmp_path, "part", **keys, federation__rounds=2)
    run(tmp_path, "part", **keys, resume=True)
    assert final(tmp_path, "part")["state"] == whole["state"]
    run(tmp_path, "again", **keys, replay=tmp_path / "whole")
    assert final(tmp_path, "again")["state"] == whole["state"]


@pytest.mark.slow
def test_transform_objects_and_keys_give_equal_results(tmp_path: Path) -> None:
    """In the data, in the call, and as the section of a file, also for a module in memory."""
    objects = v2.Compose([v2.RandomCrop(12, padding=2), v2.RandomHorizontalFlip()])
    as_keys = [{"RandomCrop": {"size": [12, 12], "padding": [2, 2, 2, 2]}}, "RandomHorizontalFlip"]
    short = {"federation__rounds": 1}
    run(tmp_path, "call", augment=objects, **short)
    run(tmp_path, "data", data=federated(tmp_path, augment=objects), **short)
    run(tmp_path, "keys", data__augment=as_keys, **short)
    found = [final(tmp_path, out)["state"] for out in ("call", "data", "keys")]
    assert found[0] == found[1] == found[2]
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    assert run(tmp_path, "net", augment=objects, model=net, **short).summary["seen"]["clients"] == 3


# --- descriptions -----------------------------------------------------------------------------------------------------


def some_transforms() -> list[Any]:
    return [
        v2.RandomCrop(32, padding=4, fill=3, padding_mode="reflect"), v2.RandomHorizontalFlip(),
        v2.RandomVerticalFlip(0.2), v2.RandomResizedCrop(32, scale=(0.5, 1.0)), v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.RandomRotation(15), v2.ToImage(),
        v2.RandomAffine(10, translate=(0.1, 0.1), interpolation=v2.InterpolationMode.BILINEAR), v2.RandomErasing(),
        v2.GaussianBlur(3), v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10), v2.RandAugment(), v2.TrivialAugmentWide(),
        v2.AugMix(), v2.RandomApply([v2.ColorJitter(0.4), v2.RandomInvert()], p=0.3), v2.RandomGrayscale(),
        v2.RandomChoice([v2.RandomVerticalFlip(), v2.RandomInvert()]), v2.RandomPerspective(), v2.RandomPosterize(3),
        v2.RandomOrder([v2.RandomEqualize(), v2.RandomAutocontrast()]),
    ]  # fmt: skip


@pytest.mark.parametrize("transform", some_transforms(), ids=lambda t: type(t).__name__)
def test_a_transform_and_its_description_give_equal_images(transform: Any) -> None:
    described = describe_transforms(transform)
    assert json.loads(json.dumps(described)) == described
    check_augment(described, DataSpec.single("pixels", (3, 32, 32)))
    (again,) = made(described)
    for seed in range(5):
        image = pixels(1, seed, (3, 32, 32))[0]
        with drawing_from(torch.Generator().manual_seed(seed)):
            expected = transform(image)
        with drawing_from(torch.Generator().manual_seed(seed)):
            assert torch.equal(again(image), expected)


def test_v1_transforms_and_compositions_are_described_as_v2() -> None:
    import torchvision.transforms as v1

    old = [
        v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(0.3), v1.ColorJitter(0.4, hue=0.1), v1.RandomRotation(15),
        v1.RandomResizedCrop(32, interpolation=v1.InterpolationMode.BICUBIC), v1.RandomErasing(), v1.GaussianBlur(3),
        v1.RandomApply([v1.RandomInvert()], p=0.3), v1.TrivialAugmentWide(), v1.AutoAugment(v1.AutoAugmentPolicy.SVHN),
    ]  # fmt: skip
    new = [
        v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(0.3), v2.ColorJitter(0.4, hue=0.1), v2.RandomRotation(15),
        v2.RandomResizedCrop(32, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomErasing(), v2.GaussianBlur(3),
        v2.RandomApply([v2.RandomInvert()], p=0.3), v2.TrivialAugmentWide(), v2.AutoAugment(v2.AutoAugmentPolicy.SVHN),
    ]  # fmt: skip
    found, expected = made(describe_transforms(v1.Compose(old))), made(describe_transforms(nn.Sequential(*new)))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        for seed in range(5):
            image = pixels(1, seed, (3, 32, 32))[0]
            with drawing_from(torch.Generator().manual_seed(seed)):
                changed = one(image)
            with drawing_from(torch.Generator().manual_seed(seed)):
                assert torch.equal(changed, other(image))
    with refusing(ExperimentError, "data.augment", "ToTensor"):
        made(describe_transforms(v1.Compose([*old, v1.ToTensor(), v1.Normalize([0.5], [0.2])])))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (lambda: v2.Lambda(lambda x: x), ("Lambda", "function")),
        (lambda: nn.Identity(), ("Identity", "torchvision.transforms.v2")),
        (lambda: 5, ("int",)),
        (lambda: [v2.RandomHorizontalFlip(), lambda x: x], ("function",)),
    ],
)
def test_a_transform_that_cannot_be_described_is_rejected(given: Callable[[], Any], facts: tuple[str, ...]) -> None:
    with refusing(ExperimentError, "augment", *facts):
        describe_transforms(given())


STANDARD = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.2])])


@pytest.mark.parametrize(
    ("described", "facts"),
    [
        (describe_transforms(STANDARD), ("ToDtype", "uint8", "standardized")),
        (["Normalize"], ("Normalize", "standardized")),
        ([{"RandomApply": {"transforms": ["ToDtype"]}}], ("ToDtype",)),
        (["MixUp"], ("MixUp",)),
        ([{"CenterCrop": {"size": 8}}], ([1, 8, 8], [1, 16, 16])),
        (["RandomFlip"], ("RandomFlip",)),
        (["functional"], ("functional",)),
        ([{"RandomCrop": {"sze": 16}}], ("RandomCrop", "sze")),
        ([{"RandomCrop": {"size": 20}}], ("RandomCrop", "16")),
        ([{"RandomRotation": {"degrees": 5, "interpolation": "cubic"}}], ("cubic", "bicubic")),
        ([{"AutoAugment": {"policy": "mnist"}}], ("mnist", "cifar10")),
    ],
)
def test_transforms_that_do_not_fit_the_images_are_rejected(described: Any, facts: tuple[Any, ...]) -> None:
    with refusing(ExperimentError, "data.augment", *facts) as error:
        check_augment(described, DataSpec.single("pixels", IMAGE))
    assert error.value.key == "data.augment"


def experiment(tmp_path: Path, **changes: str) -> Path:
    text = GOOD
    for old, new in changes.items():
        text = text.replace({"partition": "clients: 4}}", "method": "{name: fedavg}"}[old], new)
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return path


FLIPPED = "clients: 4}, augment: [RandomHorizontalFlip]}"


def test_augmentation_that_would_be_ignored_or_fail_is_rejected(tmp_path: Path) -> None:
    assert load_experiment(experiment(tmp_path, partition=FLIPPED)).data.augment == ("RandomHorizontalFlip",)
    with pytest.raises(ExperimentError) as error:
        load_experiment(experiment(tmp_path, partition=FLIPPED, method="{name: pfedgp}"))
    assert tells(str(error.value), "data.augment: ", "pfedgp")
    with pytest.raises(ExperimentError) as error:
        load_experiment(experiment(tmp_path, partition="clients: 4}, augment: [{RandomCrop: {}, RandomErasing: {}}]}"))
    assert tells(str(error.value), "data.augment", 2)
    with refusing(ExperimentError, "data.augment", "features"):
        check_augment(["RandomHorizontalFlip"], DataSpec.single("features", (8,)))
    with refusing(ExperimentError, "data.augment", "tokens"):
        check_augment(["RandomHorizontalFlip"], DataSpec.single("tokens", (8,)))


def test_clients_with_own_data_augment_too(tmp_path: Path) -> None:
    own = "{own: {kind: pixels, input_shape: [1, 16, 16], classes: [a, b]}, augment: [RandomHorizontalFlip]}"
    path = tmp_path / "own.yaml"
    path.write_text(GOOD.replace("{dataset: mnist, partition: {scheme: iid, clients: 4}}", own))
    assert load_experiment(path).data.augment == ("RandomHorizontalFlip",)
    path.write_text(path.read_text().replace("RandomHorizontalFlip", "Normalize"))
    with pytest.raises(ExperimentError) as error:
        load_experiment(path)
    assert tells(str(error.value), "data.augment: ", "Normalize")


def test_without_torchvision_a_run_is_rejected_but_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = load_experiment(experiment(tmp_path, partition=FLIPPED)).resolved_yaml()
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(ExperimentError) as error:
        load_experiment(experiment(tmp_path, partition=FLIPPED))
    assert tells(str(error.value), "data.augment: ", "torchvision")
    with refusing(ExperimentError, "torchvision", "fedloom[vision]"):
        augmentation(["RandomHorizontalFlip"], SHAPE)
    assert of_run(recorded, "a run").data.augment == ("RandomHorizontalFlip",)
    assert augmentation([], SHAPE) is None


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images as in a torch user's dataset, with a transform."""

    def __init__(self, transform: Any) -> None:
        self.x, self.transform = pixels(40, 0, (3, 12, 12)), transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.transform(self.x[place]), place % 3


@pytest.mark.parametrize("then", [[], [v2.ToDtype(torch.float32, scale=True)], list(STANDARD.transforms[1:])])
def test_images_that_differ_between_reads_are_rejected(tmp_path: Path, then: list[Any]) -> None:
    given = Pictures(v2.Compose([v2.RandomHorizontalFlip(), *then]))
    with refusing(DataError, "dataset[", "augment="):
        fedloom.Federated.from_torchvision(given, {"scheme": "iid", "clients": 2}, root=tmp_path)


@pytest.mark.slow
def test_images_with_separate_transforms_train_equally(tmp_path: Path) -> None:
    data = fedloom.Federated.from_torchvision(
        Pictures(v2.ToDtype(torch.float32, scale=True)),
        {"scheme": "iid", "clients": 2},
        root=tmp_path,
        held_out_fraction=0,
        augment=[v2.RandomCrop(12, padding=2), v2.RandomHorizontalFlip()],
    )
    found = run(tmp_path, "out", data=data, federation__rounds=1)
    assert found.summary["seen"]["clients"] == 2
