"""Targets that are not classes, and inputs beyond pixels, features and tokens: from arrays to clients and models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from facts import mentions, refusing
from numpy.typing import NDArray
from PIL import Image

import fedloom
from fedloom.data.federated import FederatedDataset, OwnDataset
from fedloom.data.manifest import Manifest
from fedloom.data.newcomer import Newcomer
from fedloom.data.overlap import overlap
from fedloom.data.own import Own, OwnClients, own_manifest, read_card
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.problem import Problem
from fedloom.data.spec import DataSpec, InputSpec, Normalization
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.loading import of
from fedloom.models.fitting import fitted
from fedloom.models.registry import LeNetSettings, LogisticSettings, MLPSettings
from fedloom.serving.personal_model import ModelCard, PersonalModel

N = 60
RNG = np.random.default_rng(35)
FEATURES = RNG.normal(3, 2, (2 * N, 4)).astype(np.float32)
SIGNALS = RNG.normal(1, 2, (2 * N, 3, 10)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (2 * N, 3, 6, 6), dtype=np.uint8)
TOKENS = RNG.integers(0, 700, (2 * N, 5))
CODES = RNG.integers(0, 9, (2 * N, 3))
CLASSES = np.arange(2 * N) % 3
PRICES = (FEATURES @ np.array([5.0, -3.0, 2.0, 1.0]) + 100).astype(np.float64)


def two(x: Any, y: NDArray[Any]) -> dict[str, tuple[Any, NDArray[Any]]]:
    """Return examples of two owners."""

    def part(rows: slice) -> Any:
        return {name: each[rows] for name, each in x.items()} if isinstance(x, Mapping) else x[rows]

    return {name: (part(rows), y[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}


def opened(x: Any, y: NDArray[Any], root: Path, **settings: Any) -> FederatedDataset:
    """Return the partition of two owners' arrays."""
    return fedloom.Federated.from_arrays(two(x, y), root=root, held_out_fraction=0.0, **settings).open()


MASKS = (IMAGES[:, 0] > 100).astype(np.int64)
VOLUMES = RNG.normal(1, 2, (2 * N, 1, 3, 4, 5)).astype(np.float32)
NAMES = np.where(TOKENS % 5 == 4, -100, TOKENS % 4)


@pytest.mark.parametrize(
    ("x", "y", "task", "outputs", "shape", "dtype"),
    [
        (FEATURES, PRICES, "regression", 1, (), torch.float32),
        (FEATURES, np.stack([PRICES, -PRICES], 1), "regression", 2, (2,), torch.float32),
        (SIGNALS, RNG.integers(0, 2, (2 * N, 5)), "multilabel", 5, (5,), torch.float32),
        (SIGNALS, RNG.integers(0, 2, (2 * N, 5)) > 0, "multilabel", 5, (5,), torch.float32),
        (IMAGES, MASKS, "segmentation", 2, (6, 6), torch.int64),
        (IMAGES, MASKS > 0, "segmentation", 2, (6, 6), torch.int64),
        (IMAGES, MASKS * 255, "segmentation", 2, (6, 6), torch.int64),
        (IMAGES, MASKS[:, None], "segmentation", 2, (6, 6), torch.int64),
        (IMAGES, MASKS.astype(np.float32), "segmentation", 2, (6, 6), torch.int64),
        (IMAGES, np.where(MASKS, 255, np.arange(6) % 3), "segmentation", 3, (6, 6), torch.int64),
        (VOLUMES, (VOLUMES[:, 0] > 1).astype(np.int64), "segmentation", 2, (3, 4, 5), torch.int64),
        (VOLUMES, VOLUMES > 1, "segmentation", 2, (3, 4, 5), torch.int64),
        (IMAGES, IMAGES / 255, "regression", 108, (3, 6, 6), torch.float32),
        (SIGNALS, SIGNALS[:, :2], "regression", 20, (2, 10), torch.float32),
        (TOKENS, TOKENS, "next_token", int(TOKENS.max()) + 1, (5,), torch.int64),
        (TOKENS, np.where(TOKENS % 5, TOKENS, -100), "next_token", int(TOKENS.max()) + 1, (5,), torch.int64),
        (TOKENS, NAMES, "next_token", 4, (5,), torch.int64),
        (FEATURES, CLASSES[:, None], "classification", 3, (), torch.int64),
        (FEATURES, CLASSES, "classification", 3, (), torch.int64),
        (FEATURES, CLASSES.astype(float), "classification", 3, (), torch.int64),
    ],
)
def test_targets_define_their_task(
    x: NDArray[Any],
    y: NDArray[Any],
    task: str,
    outputs: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "fedloom.data"):
        dataset = opened(x, y, tmp_path)
    manifest = dataset.manifest
    assert (manifest.spec.task, manifest.spec.outputs) == (task, outputs)
    assert (manifest.spec.classes == 0) is (task != "classification")
    assert any(task in record.message for record in caplog.records) is (task != "classification")
    assert Manifest.from_json(manifest.to_json()) == manifest
    found = torch.cat([dataset.client(client).train.y for client in manifest.roster])
    assert found.dtype == dtype
    assert found.shape[1:] == shape


ONE_HOT = np.eye(4)[CLASSES]


def noted(caplog: pytest.LogCaptureFixture, *facts: object) -> bool:
    """Return True if a warning names these facts; forget the warnings so far."""
    found = any(mentions(record.message, *facts) for record in caplog.records if record.levelno == logging.WARNING)
    caplog.clear()
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_rows_with_one_1_are_noted_and_are_classes_on_request(
    dtype: type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    y = ONE_HOT.astype(dtype)
    assert opened(FEATURES, y, tmp_path).manifest.spec.task == "multilabel"
    assert noted(caplog, "exactly one 1", "task: classification")
    for classes in (None, ["p", "q", "r", "s"], ["7", "5", "3", "1"]):
        dataset = opened(FEATURES, y, tmp_path, task="classification", classes=classes)
        assert dataset.manifest.spec.class_names == tuple(classes or "0123")
        for client in dataset.manifest.roster:
            shard = dataset.tensors(client)
            rows = [int(np.flatnonzero((row == FEATURES).all(1))[0]) for row in shard["train_x"].numpy()]
            assert shard["train_y"].tolist() == CLASSES[rows].tolist()
    assert not noted(caplog, "exactly one 1")
    with refusing(DataError, "4 columns", "p, q"):
        opened(FEATURES, y, tmp_path, task="classification", classes=["p", "q"])
    several = y.copy()
    several[0] = 1
    opened(FEATURES, several, tmp_path)
    assert not noted(caplog, "exactly one 1")
    with refusing(DataError, "[n, 4]"):
        opened(FEATURES, several, tmp_path, task="classification")


def test_columns_with_one_1_are_classes_of_their_names_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["red", "green", "blue", "none"]
    frame = pandas.DataFrame(FEATURES, columns=list("abcd")).assign(
        **{name: ONE_HOT[:, i].astype(int) for i, name in enumerate(names)}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)

    def read(**source: Any) -> Manifest:
        source |= {"path": str(tmp_path / "t.csv"), "targets": names}
        data = {"dataset": "table", "source": source, "root": str(tmp_path)}
        return fedloom.Federated({**data, "partition": {"scheme": "iid", "clients": 2}}).open().manifest

    assert read().spec.task == "multilabel"
    assert noted(caplog, "data.source.task: classification")
    manifest = read(task="classification")
    assert (manifest.spec.task, manifest.spec.class_names) == ("classification", tuple(names))
    assert [count > 0 for count in manifest.clients[0].class_counts["train"]] == [True, True, True, False]
    scheme = {"scheme": "iid", "clients": 2}
    again = fedloom.Federated.from_frame(frame, label=names, task="classification", scheme=scheme, root=tmp_path)
    assert [entry.sha256 for entry in again.open().manifest.clients] == [entry.sha256 for entry in manifest.clients]
    frame.loc[3, "none"] = 1
    frame.to_csv(tmp_path / "t.csv", index=False)
    with refusing(DataError, "exactly one 1", "line 5", "label"):
        read(task="classification")


@pytest.mark.parametrize(("labels", "listed"), [
    (("action", "comedy", "action|comedy"), True),
    (("a; b", "b; c", "a; c"), True),
    (("T-shirt|top", "trouser", "dress"), False),
])  # fmt: skip
def test_cells_that_list_several_labels_are_noted(
    labels: tuple[str, ...], listed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    y = np.array(labels)[CLASSES]
    assert opened(FEATURES, y, tmp_path).manifest.spec.class_names == tuple(sorted(labels))
    assert noted(caplog, "multilabel", "get_dummies", labels[-1]) is listed
    frame = pandas.DataFrame(FEATURES, columns=list("abcd")).assign(label=y)
    frame.to_csv(tmp_path / "t.csv", index=False)
    packed = pack(tmp_path / "t.csv", tmp_path / "out", PackSettings())
    assert any(mentions(note, "targets", labels[-1]) for note in packed.notes) is listed


@pytest.mark.parametrize(
    ("column", "counts"),
    [
        (np.arange(2 * N), True),
        (np.arange(2 * N) * 7 + 1000, True),
        (np.arange(2 * N) / 2, False),
        (np.arange(2 * N)[::-1], False),
        (np.arange(2 * N) // 2, False),
    ],
)
def test_columns_that_number_the_rows_are_noted(
    column: NDArray[Any], counts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = pandas.DataFrame({"patient": column, "age": FEATURES[:, 0], "label": CLASSES})
    frame.to_csv(tmp_path / "t.csv", index=False)
    packed = pack(tmp_path / "t.csv", tmp_path / "out", PackSettings())
    assert any(mentions(note, "column patient", "leave it out") for note in packed.notes) is counts
    assert not any(mentions(note, "age") for note in packed.notes)
    fedloom.Federated.from_frame(frame, label="label", scheme={"scheme": "iid", "clients": 2}, root=tmp_path)
    assert noted(caplog, "column patient", "leave it out") is counts


@pytest.mark.parametrize(("shape", "last"), [
    ((8, 8, 3), True), ((20, 3), True), ((9, 6, 6, 1), True),
    ((3, 8, 8), False), ((1, 4, 8, 8), False), ((4,), False), ((64, 32), False), ((2, 2), False),
])  # fmt: skip
def test_features_whose_last_axis_looks_like_channels_are_noted(
    shape: tuple[int, ...], last: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = RNG.normal(size=(2 * N, *shape)).astype(np.float32)
    opened(x, CLASSES, tmp_path)
    assert noted(caplog, "channel_axis: last", list(shape), "moveaxis") is last
    opened(x, CLASSES, tmp_path, channel_axis="last")
    assert not noted(caplog, "channel_axis")


def test_regression_targets_are_standardized_over_training_data_of_seen_clients(tmp_path: Path) -> None:
    many = {name: (FEATURES[i::6], PRICES[i::6]) for i, name in enumerate("abcdef")}
    data = fedloom.Federated.from_arrays(many, root=tmp_path, held_out_fraction=0.5)
    for measured_on in ("seen", "pool"):
        section = data.section | {"normalization": measured_on}
        dataset = fedloom.Federated(section).open()
        manifest = dataset.manifest
        names = manifest.roster if measured_on == "seen" else (*manifest.roster, *manifest.unseen)
        raw = np.concatenate([dataset.tensors(name)["train_y"].numpy() for name in names]).astype(np.float64)
        assert manifest.spec.targets.mean == pytest.approx((raw.mean(),), rel=1e-12)
        assert manifest.spec.targets.std == pytest.approx((raw.std(),), rel=1e-12)
        split, kept = dataset.client(names[0]).test, dataset.tensors(names[0])["test_y"].numpy()
        expected = (kept - raw.mean()) / raw.std()
        assert np.allclose(split.y.numpy(), expected, atol=1e-5)


def test_a_field_of_numbers_has_one_scale(tmp_path: Path) -> None:
    y = (SIGNALS[:, :2] * 3 + 5).astype(np.float32)
    dataset = opened(SIGNALS, y, tmp_path)
    manifest = dataset.manifest
    raw = np.concatenate([dataset.tensors(name)["train_y"].numpy() for name in manifest.roster]).astype(np.float64)
    assert manifest.spec.targets.mean == pytest.approx((raw.mean(),), rel=1e-12)
    assert manifest.spec.targets.std == pytest.approx((raw.std(),), rel=1e-12)
    split = torch.cat([dataset.client(name).train.y for name in manifest.roster])
    assert np.allclose(split.numpy(), (raw - raw.mean()) / raw.std(), atol=1e-5)
    model = PersonalModel(_Fixed(lambda x: x[:, :2]), card(manifest))  # type: ignore[arg-type]
    x = torch.from_numpy(SIGNALS[:5])
    figures = manifest.spec.inputs[""].normalization
    inputs = (SIGNALS[:5] - np.reshape(figures.mean, (1, -1, 1))) / np.reshape(figures.std, (1, -1, 1))
    assert np.allclose(model(x).numpy(), inputs[:, :2] * raw.std() + raw.mean(), rtol=1e-4, atol=1e-4)


def test_a_named_input_may_be_one_number(tmp_path: Path) -> None:
    lengths = np.arange(2 * N) % 5 + 1
    dataset = opened({"text": TOKENS, "lengths": lengths, "age": FEATURES[:, 0]}, CLASSES, tmp_path)
    manifest = dataset.manifest
    assert {name: (spec.kind, spec.shape, spec.high) for name, spec in manifest.spec.inputs.items()} == {
        "age": ("features", (), None),
        "lengths": ("integers", (), 6),
        "text": ("integers", (5,), int(TOKENS.max()) + 1),
    }
    assert Manifest.from_json(manifest.to_json()) == manifest
    x = dataset.client(manifest.roster[0]).train.x
    assert isinstance(x, Mapping)
    assert (x["age"].shape, x["lengths"].dtype, x["lengths"].dim()) == ((len(x["text"]),), torch.int64, 1)
    raw = np.concatenate([dataset.tensors(name)["train_x.age"].numpy() for name in manifest.roster]).astype(np.float64)
    assert manifest.spec.inputs["age"].normalization.mean == pytest.approx((raw.mean(),), rel=1e-9)
    assert float(torch.cat([dataset.client(name).train.x["age"] for name in manifest.roster]).mean()) == pytest.approx(
        0, abs=1e-5
    )


def test_a_named_task_is_accepted_or_rejected(tmp_path: Path) -> None:
    whole = np.arange(2 * N) % 7
    manifest = opened(FEATURES, whole, tmp_path, task="regression").manifest
    assert (manifest.spec.task, manifest.spec.outputs) == ("regression", 1)
    assert opened(IMAGES, MASKS, tmp_path, outputs=4).manifest.spec.outputs == 4
    assert opened(TOKENS, TOKENS, tmp_path, outputs=1000).manifest.spec.outputs == 1000
    assert opened(IMAGES, MASKS, tmp_path, classes=["ground", "sky"]).manifest.spec.targets.names == ("ground", "sky")
    cases: list[tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = [
        (FEATURES, CLASSES, {"task": "multilabel"}, ("multilabel", "[n, K]")),
        (FEATURES, CLASSES, {"task": "segmentation"}, ("segmentation", "height")),
        (FEATURES, np.stack([CLASSES, CLASSES], 1), {"task": "multilabel"}, ("0 to 1", "client a: y[2]")),
        (IMAGES, MASKS[:, :4], {"task": "segmentation"}, ("[n, 4, 6]", "[6, 6]")),
        (TOKENS, TOKENS[:, 1:], {"task": "next_token"}, ("[n, 4]", "[5]")),
        (FEATURES, np.stack([CLASSES, CLASSES], 1), {}, ("[n, 2]", "multilabel", "regression")),
        (IMAGES, MASKS * 3, {"outputs": 2}, ("outputs is 2", "4")),
        (IMAGES, MASKS * 3, {"classes": ["p", "q"]}, ("0 to 1", "client a: y[0]")),
        (FEATURES, np.where(PRICES > 100, np.nan, PRICES), {}, ("finite", "client a: y[")),
        (FEATURES, PRICES * 1e-3 + 1e7, {}, ("32-bit",)),
        (VOLUMES, np.repeat(VOLUMES > 1, 2, 1), {}, ("[n, 2, 3, 4, 5]", "depth")),
        (FEATURES, np.array(["p", "q"] * N), {"task": "regression"}, ("<U1", "regression")),
    ]
    for x, y, settings, facts in cases:
        with refusing(DataError, *facts):
            opened(x, y, tmp_path, **settings)
    with pytest.raises(ExperimentError) as unknown:
        opened(FEATURES, CLASSES, tmp_path, task="ranking")
    assert (unknown.value.key, unknown.value.found) == ("task", "ranking")


def test_integers_are_kept_and_features_of_any_rank_are_standardized_along_an_axis(tmp_path: Path) -> None:
    dataset = opened(TOKENS, CLASSES, tmp_path)
    manifest = dataset.manifest
    assert (manifest.spec.kind, manifest.spec.inputs[""].high, manifest.spec.input_shape) == (
        "integers",
        int(TOKENS.max()) + 1,
        (5,),
    )
    raw = torch.cat([dataset.tensors(name)["train_x"] for name in manifest.roster])
    kept = torch.cat([dataset.client(name).train.x for name in manifest.roster])
    assert kept.dtype == torch.int64
    assert torch.equal(kept, raw)
    as_numbers = torch.cat([dataset.standardized(name).train.x for name in manifest.roster])
    expected = (raw.double() - raw.double().mean(0)) / raw.double().std(0, correction=0)
    assert as_numbers.dtype == torch.float32
    assert torch.allclose(as_numbers.double(), expected, atol=1e-5)
    for axis, size, others in (("first", 3, (0, 2)), ("last", 10, (0, 1))):
        dataset = opened(SIGNALS, CLASSES, tmp_path, channel_axis=axis)
        assert len(dataset.manifest.spec.normalization.mean) == size
        assert ('"channel_axis":"last"' in dataset.manifest.to_json()) is (axis == "last")
        x = torch.cat([dataset.client(name).train.x for name in dataset.manifest.roster]).double()
        assert torch.allclose(x.mean(others), torch.zeros(size, dtype=torch.float64), atol=1e-6)
        assert torch.allclose(x.square().mean(others), torch.ones(size, dtype=torch.float64), atol=1e-5)


def test_negative_integers_are_measurements(tmp_path: Path) -> None:
    assert opened(CODES - 4, CLASSES, tmp_path).manifest.spec.kind == "features"
    assert opened(CODES.astype(np.float32), CLASSES, tmp_path).manifest.spec.kind == "features"


def test_named_inputs_reach_clients_with_their_kinds(tmp_path: Path) -> None:
    x = {"image": IMAGES, "row": FEATURES, "codes": CODES}
    dataset = opened(x, PRICES, tmp_path)
    manifest = dataset.manifest
    assert (manifest.spec.kind, manifest.spec.input_shape) == ("named", ())
    assert {name: spec.kind for name, spec in manifest.spec.inputs.items()} == {
        "codes": "integers",
        "image": "pixels",
        "row": "features",
    }
    assert Manifest.from_json(manifest.to_json()) == manifest
    alone = opened(FEATURES, PRICES, tmp_path).manifest.spec.inputs[""]
    assert manifest.spec.inputs["row"] == alone
    train = dataset.client(manifest.roster[0]).train
    assert {name: each.dtype for name, each in train.x.items()} == {
        "codes": torch.int64,
        "image": torch.float32,
        "row": torch.float32,
    }
    assert len(train) == len(train.x["row"]) == len(train.y)
    rows = {tuple(row) for row in CODES[:N].tolist()}
    assert {tuple(row) for row in train.x["codes"].tolist()} <= rows
    found = overlap(dataset, dataset)
    assert (found.train, found.validation, found.test) == (sum(entry.train for entry in manifest.clients), 0, 0)


def test_repeated_named_inputs_stay_in_one_split(tmp_path: Path) -> None:
    x = {"row": np.repeat(FEATURES[: N // 2], 4, axis=0), "codes": np.repeat(CODES[: N // 2], 4, axis=0)}
    dataset = opened(x, CLASSES, tmp_path)
    seen: dict[bytes, str] = {}
    for client in dataset.manifest.roster:
        tensors = dataset.tensors(client)
        for split in ("train", "validation", "test"):
            for row in tensors[f"{split}_x.row"].numpy():
                assert seen.setdefault(row.tobytes(), split) == split


@pytest.mark.parametrize(
    ("x", "facts"),
    [
        ({"row": FEATURES, "image": IMAGES[:-1]}, ("60", "59")),
        ({"row": FEATURES, "a b": IMAGES}, ("'a b'", "letters")),
        ({"row": np.array(["p"] * 2 * N)}, ("x.row", "[n]", "[n, features]")),
        ({}, ("x",)),
    ],
)
def test_wrong_named_inputs_are_rejected(x: dict[str, NDArray[Any]], facts: tuple[str, ...], tmp_path: Path) -> None:
    with refusing(DataError, *facts):
        opened(x, CLASSES, tmp_path)


def test_clients_have_the_same_input_names(tmp_path: Path) -> None:
    clients = {"a": ({"row": FEATURES[:N]}, CLASSES[:N]), "b": ({"line": FEATURES[N:]}, CLASSES[N:])}
    with refusing(DataError, "client b", "row", "line"):
        fedloom.Federated.from_arrays(clients, root=tmp_path)


SCHEMES: list[tuple[dict[str, Any], str | None]] = [
    ({"scheme": "iid", "clients": 4}, None),
    ({"scheme": "imbalanced", "clients": 4, "large_size": 20, "small_size": 10}, None),
    ({"scheme": "natural"}, None),
    ({"scheme": "dirichlet", "clients": 4, "alpha": 1.0}, "data.partition.scheme"),
    ({"scheme": "classes", "clients": 4, "classes_per_client": 2}, "data.partition.scheme"),
    ({"scheme": "iid", "clients": 4, "shift": {"kind": "labels"}}, "data.partition.shift.kind"),
]


@pytest.mark.parametrize(("scheme", "key"), SCHEMES)
def test_schemes_that_need_classes_reject_regression(scheme: dict[str, Any], key: str | None, tmp_path: Path) -> None:
    if key is None:
        assert opened(FEATURES, PRICES, tmp_path, partition=scheme).manifest.spec.task == "regression"
        return
    with pytest.raises(ExperimentError) as error:
        opened(FEATURES, PRICES, tmp_path, partition=scheme)
    assert key in str(error.value)


def test_target_quantiles_are_assigned_like_classes(tmp_path: Path) -> None:
    scheme = {"scheme": "classes", "clients": 6, "classes_per_client": 1, "quantiles": 3}
    dataset = opened(FEATURES, PRICES, tmp_path, partition=scheme)
    ranges = []
    for client in dataset.manifest.roster:
        y = torch.cat([dataset.tensors(client)[f"{split}_y"] for split in ("train", "validation")])
        ranges.append((float(y.min()), float(y.max())))
    thirds = {low: max(high for other, high in ranges if other == low) for low, _ in ranges}
    assert len(ranges) == 6
    ordered = sorted(ranges)
    for pair in (ordered[1], ordered[2]), (ordered[3], ordered[4]):
        assert pair[0][1] < pair[1][0]  # two clients of each third, which do not overlap
    assert thirds
    for y, facts in ((CLASSES, ("quantiles", "classes")), (MASKS, ("quantiles", "segmentation"))):
        with refusing(ExperimentError, *facts):
            opened(IMAGES, y, tmp_path, partition=scheme)
    with pytest.raises(ExperimentError) as error:
        opened(FEATURES, np.where(np.arange(2 * N) % 9, 1.5, PRICES), tmp_path, partition=scheme)
    assert error.value.key == "data.partition.quantiles"


def test_masks_are_rotated_with_their_images(tmp_path: Path) -> None:
    scheme = {"scheme": "iid", "clients": 4, "shift": {"kind": "rotation", "groups": 4}}
    dataset = opened(IMAGES, MASKS, tmp_path, partition=scheme)
    assert dataset.manifest.shift_groups is not None
    for client in dataset.manifest.roster:
        tensors = dataset.tensors(client)
        assert torch.equal(tensors["train_y"].bool(), tensors["train_x"][:, 0] > 100)
    assert overlap(dataset, opened(IMAGES, MASKS, tmp_path)).any


# --- tables and folders -----------------------------------------------------------------------------------------------


def frame() -> pandas.DataFrame:
    """Return a table with measurements, codes, an owner, and targets."""
    return pandas.DataFrame(FEATURES, columns=list("pqrs")).assign(
        code=CODES[:, 0], kind=CODES[:, 1], site=["u", "v"] * N, price=PRICES, low=PRICES < 100, high=PRICES > 90
    )


def test_frames_have_numbers_labels_and_codes_as_requested(tmp_path: Path) -> None:
    def made(**how: Any) -> DataSpec:
        drop = how.pop("drop", [])
        data = fedloom.Federated.from_frame(
            frame().drop(columns=drop), client="site", root=tmp_path, held_out_fraction=0.0, **how
        )
        return data.open().manifest.spec

    found = made(label="price")
    assert (found.task, found.targets.names, found.kind) == ("regression", ("price",), "features")
    found = made(label=["low", "high"])
    assert (found.task, found.targets.names, found.targets.shape) == ("multilabel", ("low", "high"), (2,))
    found = made(label=["price", "p"])
    assert (found.task, found.targets.shape) == ("regression", (2,))
    found = made(label="kind", integers=["code"])
    assert (found.classes, found.kind) == (9, "named")
    assert {name: spec.shape for name, spec in found.inputs.items()} == {"features": (7,), "integers": (1,)}
    assert found.inputs["integers"].high == 9
    found = made(label="price", integers=True, drop=list("pqrs"))
    assert (found.kind, found.input_shape) == ("integers", (4,))
    with refusing(DataError, "column p", "integer"):
        made(label="price", integers=["code", "p"])
    with refusing(DataError, "'nothing'", "integers"):
        made(label="price", integers=["nothing"])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_have_a_task_target_columns_and_integers(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{ending}"
    frame().to_csv(path, index=False) if ending == "csv" else frame().to_parquet(path, index=False)

    def made(**how: Any) -> DataSpec:
        source = {"path": str(path), "client": "site", **how}
        section = {"dataset": "table", "source": source, "root": str(tmp_path), "partition": {"scheme": "natural"}}
        return fedloom.Federated(section).open().manifest.spec

    with refusing(DataError, "measured", "task: regression"):
        made(label="price")
    found = made(label="price", task="regression")
    assert found.targets.mean == pytest.approx((PRICES.mean(),), rel=0.1)
    assert made(targets=["low", "high"]).task == "multilabel"
    assert made(targets=["low", "high"], task="regression").task == "regression"
    assert made(label="price", task="regression", integers=["code", "kind"]).inputs["integers"].shape == (2,)


def test_the_task_of_an_experiment_is_that_of_its_source(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    frame()[["p", "q", "kind"]].to_csv(path, index=False)
    section = {"dataset": "table", "source": {"path": str(path), "label": "kind"}, "root": str(tmp_path)}
    section |= {"partition": {"scheme": "iid", "clients": 2}}
    plain = {
        "name": "t",
        "data": section,
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg", "local": {"steps": 1}},
        "federation": {"rounds": 1, "clients_per_round": 1},
    }
    assert of(plain).data.opened().spec.task == "classification"
    experiment = of({**plain, "task": {"name": "regression"}})
    assert experiment.data.opened().spec.task == "regression"
    kept = {**section, "dataset": "arrays", "source": {"path": str(experiment.data.opened().at)}}
    assert of({**plain, "data": kept}).data.opened().spec.task == "regression"
    with refusing(ExperimentError, "task", "regression", "classification"):
        of({**plain, "data": kept, "task": {"name": "classification"}})


def masked_folder(folder: Path, *, prefix: str = "", scale: int = 255) -> None:
    """Write 12 images with masks of 0 and ``scale``."""
    for i in range(12):
        for kind, values in (("images", IMAGES[i].transpose(1, 2, 0)), ("masks", (MASKS[i] * scale).astype(np.uint8))):
            path = folder / prefix / kind / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(path)


@pytest.mark.parametrize("scale", [1, 255])
def test_a_folder_of_images_and_masks_is_segmentation(scale: int, tmp_path: Path) -> None:
    for owner in ("ann", "bob"):
        masked_folder(tmp_path / "data", prefix=owner, scale=scale)
    source = {"path": str(tmp_path / "data"), "client": "folder"}
    section = {
        "dataset": "folder",
        "source": source,
        "root": str(tmp_path),
        "partition": {"scheme": "iid", "clients": 2},
    }
    dataset = fedloom.Federated(section).open()
    assert (dataset.manifest.spec.task, dataset.manifest.spec.outputs, dataset.manifest.spec.kind) == (
        "segmentation",
        2,
        "pixels",
    )
    for client in dataset.manifest.roster:
        tensors = dataset.tensors(client)
        assert torch.equal(tensors["train_y"].bool(), tensors["train_x"][:, 0] > 100)


def test_missing_and_mismatched_masks_are_named(tmp_path: Path) -> None:
    masked_folder(tmp_path / "data", scale=1)
    (tmp_path / "data/masks/3.png").unlink()
    (tmp_path / "data/images/4.png").unlink()
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(tmp_path / "data/masks/5.png")
    Image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(tmp_path / "data/masks/6.png")
    with pytest.raises(DataError) as error:
        pack(tmp_path / "data", tmp_path / "out", PackSettings())
    facts = ("without a mask", "images/3.png", "without an image", "masks/4.png", "5 x 6", "channels")
    assert mentions(str(error.value), *facts), str(error.value)
    assert not (tmp_path / "out").exists()


def read(dataset: str, path: Path, root: Path, **source: Any) -> FederatedDataset:
    """Return the partition of a source in another library's format."""
    partition = {"scheme": "iid", "clients": 2}
    section = {"dataset": dataset, "source": {"path": str(path), **source}, "root": str(root), "partition": partition}
    return fedloom.Federated(section).open()


@pytest.mark.parametrize(
    ("images", "labels", "kind", "shape", "task"),
    [
        (IMAGES[:, 0], CLASSES[:, None], "pixels", (1, 6, 6), "classification"),
        (IMAGES.transpose(0, 2, 3, 1), CLASSES[:, None], "pixels", (3, 6, 6), "classification"),
        (np.stack([IMAGES[:, 0]] * 6, 1), CLASSES[:, None], "features", (1, 6, 6, 6), "classification"),
        (IMAGES[:, 0], RNG.integers(0, 2, (2 * N, 4)), "pixels", (1, 6, 6), "multilabel"),
    ],
)
def test_medmnist_files_have_images_volumes_and_labels(
    images: NDArray[Any], labels: NDArray[Any], kind: str, shape: tuple[int, ...], task: str, tmp_path: Path
) -> None:
    parts = {"train": slice(0, 80), "val": slice(80, 100), "test": slice(100, None)}
    arrays = {f"{name}_images": images[rows] for name, rows in parts.items()}
    arrays |= {f"{name}_labels": labels[rows].astype(np.uint8) for name, rows in parts.items()}
    np.savez(tmp_path / "m.npz", **arrays)
    manifest = read("medmnist", tmp_path / "m.npz", tmp_path).manifest
    assert (manifest.spec.kind, manifest.spec.input_shape, manifest.spec.task) == (kind, shape, task)
    assert 16 <= sum(entry.test for entry in manifest.clients) <= 20  # equally many of each class for both
    del arrays["val_labels"]
    np.savez(tmp_path / "n.npz", **arrays)
    with refusing(DataError, "val_labels"):
        read("medmnist", tmp_path / "n.npz", tmp_path)


# --- own data and newcomers -------------------------------------------------------------------------------------------

OWN = {
    "kind": "named",
    "inputs": {"row": {"kind": "features", "shape": [4]}, "codes": {"kind": "integers", "shape": [3], "high": 9}},
    "targets": {"task": "regression"},
}


def packed(tmp_path: Path, own: Own) -> OwnClients:
    """Pack two clients, and open them."""
    for name, rows in (("a", slice(0, N)), ("b", slice(N, None))):
        np.savez(tmp_path / f"{name}.npz", **{"x.row": FEATURES[rows], "x.codes": CODES[rows], "y": PRICES[rows]})
        pack(tmp_path / f"{name}.npz", tmp_path / "packed" / name, PackSettings(request=Request(own.spec)))
    return OwnClients.open([tmp_path / "packed"])


def test_targets_of_own_data_are_measured_exactly(tmp_path: Path) -> None:
    own = Own.model_validate(OWN)
    clients = packed(tmp_path, own)
    clients.check(own)
    found = clients.measured(own)
    manifest = own_manifest(own, clients.entries, 1, found)
    assert (manifest.spec.normalization, manifest.spec.numbers) == (found, 8)
    assert Manifest.from_json(manifest.to_json()) == manifest
    dataset = OwnDataset(clients, manifest)
    raw = [dataset.tensors(name) for name in clients.cards]
    y = np.concatenate([tensors["train_y"].numpy() for tensors in raw]).astype(np.float64)
    assert manifest.spec.targets.mean == pytest.approx((y.mean(),), rel=1e-12)
    assert manifest.spec.targets.std == pytest.approx((y.std(),), rel=1e-9)
    codes = np.concatenate([tensors["train_x.codes"].numpy() for tensors in raw])
    assert manifest.spec.inputs["codes"].normalization.mean == pytest.approx(tuple(codes.mean(0)), rel=1e-12)
    both = torch.cat([dataset.client(name).train.y for name in clients.cards])
    assert float(both.mean()) == pytest.approx(0, abs=1e-5)
    other = Own.model_validate(OWN | {"targets": {"task": "multilabel", "shape": [1]}})
    with refusing(DataError, "targets", "regression", "multilabel"):
        clients.check(other)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"targets": None}, ("classes",)),
        ({"classes": ["p"]}, ("classes", "targets")),
        ({"targets": {"task": "segmentation", "shape": [6, 6]}}, ("outputs",)),
        ({"targets": {"task": "multilabel"}}, ("multilabel",)),
        ({"inputs": None}, ("inputs",)),
        ({"inputs": {"codes": {"kind": "integers", "shape": [3]}}}, ("codes", "high")),
        ({"inputs": {"a b": {"kind": "features", "shape": [3]}}}, ("a b",)),
        ({"input_shape": [3]}, ("input_shape",)),
        ({"normalization": {"mean": [0.0], "std": [1.0]}}, ("1 means", "8")),
    ],
)
def test_contradictory_requirements_are_rejected(change: dict[str, Any], facts: tuple[str, ...]) -> None:
    with refusing(ValueError, *facts):
        Own.model_validate(OWN | change)


def test_packing_checks_targets_against_the_experiment(tmp_path: Path) -> None:
    own = Own.model_validate(
        {
            "kind": "features",
            "input_shape": [4],
            "targets": {"task": "multilabel", "shape": [2], "names": ["low", "high"]},
        }
    )
    table = frame()[["p", "q", "r", "s", "low", "high"]]
    table.to_csv(tmp_path / "t.csv", index=False)
    card = pack(tmp_path / "t.csv", tmp_path / "out", PackSettings(request=Request(own.spec))).card
    assert read_card(tmp_path / "out") == card
    assert (card.spec.targets, card.features) == (own.spec.targets, ("p", "q", "r", "s"))
    np.savez(tmp_path / "t.npz", x=FEATURES, y=RNG.integers(0, 2, (2 * N, 3)))
    with refusing(DataError, "t.npz", "3", "2"):
        pack(tmp_path / "t.npz", tmp_path / "other", PackSettings(request=Request(own.spec)))


def described(dataset: FederatedDataset) -> Problem:
    """Return the requirements of a run on a partition, as a server sends them."""
    manifest = dataset.manifest
    return Problem.from_json(Problem("d", manifest.spec, 2).to_json())


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (FEATURES, PRICES),
        (SIGNALS, RNG.integers(0, 2, (2 * N, 5))),
        (IMAGES, MASKS),
        (TOKENS, TOKENS),
        ({"row": FEATURES, "codes": CODES}, PRICES),
        ({"image": IMAGES, "row": FEATURES}, CLASSES),
    ],
)
def test_new_clients_get_the_same_examples_as_clients(x: Any, y: NDArray[Any], tmp_path: Path) -> None:
    dataset = opened(x, y, tmp_path)
    client = dataset.manifest.roster[0]
    tensors = dataset.tensors(client)
    raw = {name: tensors[f"train_x.{name}"] for name in x} if isinstance(x, Mapping) else tensors["train_x"]
    new = Newcomer.from_arrays("new", raw, tensors["train_y"], described(dataset)).client("new").train
    old = dataset.client(client).train
    assert torch.equal(new.y, old.y)
    for name in x if isinstance(x, Mapping) else ("",):
        assert torch.equal(new.x[name] if name else new.x, old.x[name] if name else old.x)


def test_new_clients_with_other_targets_or_inputs_are_rejected(tmp_path: Path) -> None:
    numbers, named = (
        described(opened(FEATURES, PRICES, tmp_path)),
        described(opened({"row": FEATURES}, CLASSES, tmp_path)),
    )
    labels = described(opened(FEATURES, RNG.integers(0, 2, (2 * N, 5)), tmp_path))
    cases: list[tuple[Problem, Any, Any, tuple[str, ...]]] = [
        (numbers, FEATURES[:3], PRICES[:2], ("[2]", "[3]")),
        (numbers, FEATURES[:3], np.full(3, np.inf), ("finite",)),
        (labels, FEATURES[:3], np.full((3, 5), 2), ("0 to 1",)),
        (labels, FEATURES[:3], np.full((3, 5), 0.5), ("y",)),
        (named, FEATURES[:3], None, ("row",)),
        (named, {"line": FEATURES[:3]}, None, ("line", "row")),
        (numbers, {"row": FEATURES[:3]}, None, ("row",)),
        (named, {"row": FEATURES[:3, :2]}, None, ("[3, 2]",)),
    ]
    for wanted, x, y, facts in cases:
        with refusing(DataError, *facts):
            Newcomer.from_arrays("new", x, y, wanted)


# --- models -----------------------------------------------------------------------------------------------------------


def test_built_in_models_standardize_integers_and_reject_named_inputs() -> None:
    specs = {"": InputSpec("integers", (3,), Normalization((1.0,) * 3, (2.0,) * 3), high=9)}
    for choice in (MLPSettings(), LogisticSettings()):
        found = fitted(choice, specs, 4)
        assert found.standardizes
        plain = fitted(choice, {"": InputSpec("features", (3,))}, 4)
        assert found.model.layout == plain.model.layout
        assert not plain.standardizes
    with pytest.raises(ExperimentError) as error:
        fitted(LeNetSettings(), specs, 4)
    assert error.value.key == "model.name"
    with refusing(ExperimentError, "mlp", "row", "codes"):
        fitted(MLPSettings(), {"row": specs[""], "codes": specs[""]}, 4)


class _Fixed:
    """Predictor with given predictions."""

    def __init__(self, function: Callable[[Any], torch.Tensor]) -> None:
        self.function = function

    def named(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(1)}

    def predict(self, named: Mapping[str, torch.Tensor], x: Any) -> torch.Tensor:
        return self.function(x) + named["weight"]


def card(manifest: Manifest, **others: Any) -> ModelCard:
    """Return the card of a model for a manifest's data."""
    about = {"spec": manifest.spec} | others
    about |= {"run": "r", "round": 1, "digest": "0" * 64, "algorithm": "fedavg", "predictor": "personal"}
    return ModelCard(model="mlp", client="c", **about)


def test_personal_models_predict_in_the_units_of_the_targets(tmp_path: Path) -> None:
    manifest = opened(FEATURES, PRICES, tmp_path).manifest
    model = PersonalModel(_Fixed(lambda x: x[:, :1]), card(manifest))  # type: ignore[arg-type]
    x = torch.from_numpy(FEATURES[:5])
    mean, std = manifest.spec.normalization.mean[0], manifest.spec.normalization.std[0]
    expected = (FEATURES[:5, :1] - mean) / std * manifest.spec.targets.std[0] + manifest.spec.targets.mean[0]
    assert np.allclose(model(x).numpy(), expected, rtol=1e-5)
    assert json.loads(json.dumps(model.card.as_json()))["spec"]["targets"]["task"] == "regression"
    labels = opened(SIGNALS, RNG.integers(0, 2, (2 * N, 5)), tmp_path).manifest
    signal = labels.spec.inputs[""].normalization
    model = PersonalModel(_Fixed(lambda x: x[:, 0, :5]), card(labels))  # type: ignore[arg-type]
    assert torch.allclose(
        model(SIGNALS[:4]),
        torch.sigmoid((torch.from_numpy(SIGNALS[:4, 0, :5]) - signal.mean[0]) / signal.std[0]),
        atol=1e-6,
    )


def test_personal_models_accept_named_inputs_and_are_exported_with_them(tmp_path: Path) -> None:
    manifest = opened({"row": FEATURES, "codes": CODES}, PRICES, tmp_path).manifest
    predictor: Any = _Fixed(lambda x: x["row"][:, :1] + x["codes"][:, :1])
    model = PersonalModel(predictor, card(manifest, standardizes=True))
    x = {"row": torch.from_numpy(FEATURES[:5]), "codes": torch.from_numpy(CODES[:5])}
    found = model(x)
    assert found.shape == (5, 1)
    model.save(tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.allclose(program(x), found, rtol=1e-5)
    for wrong in (FEATURES[:5], {"row": FEATURES[:5]}):
        with pytest.raises(DataError):
            model(wrong)
    model.save(tmp_path / "m.safetensors")
    readme = (tmp_path / "m.md").read_text()
    assert mentions(readme, "row", "codes", "mean", "standardized")
