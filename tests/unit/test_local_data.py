"""User data without a package: arrays, DataFrames, torchvision datasets, folders of images, tables."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from facts import telling, tells
from PIL import Image

import fedloom
from fedloom.engine.run_data import make_partition
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import from_shared_json, of

RNG = np.random.default_rng(0)
TASK: dict[str, Any] = {
    "name": "own",
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg", "local": {"steps": 1}},
    "federation": {"rounds": 1, "clients_per_round": 2},
    "runtime": {"workers": 0},
}


def people(n: int = 30) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    names = ("ann", "bob", "cy", "dee")
    random = np.random.default_rng(1)
    return {name: (random.normal(size=(n, 3)), random.integers(0, 2, n)) for name in names}


@pytest.mark.slow
def test_arrays_give_equal_bits_when_run_resumed_and_loaded(tmp_path: Path) -> None:
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0.25)
    run = fedloom.run(TASK, data=data, out=tmp_path / "run", report=False, progress=False)
    assert sorted(run.clients["owner"]) == ["ann", "bob", "cy", "dee"]
    assert (~run.clients["seen"]).sum() == 1
    tensors = {name: (torch.tensor(x), y.tolist()) for name, (x, y) in people().items()}
    again = fedloom.Federated.from_arrays(tensors, root=tmp_path / "data", held_out_fraction=0.25)
    assert again.section == data.section
    resumed = fedloom.run(TASK, data=again, out=tmp_path / "run", resume=True, report=False, progress=False)
    assert resumed.summary == run.summary
    with telling(DataError, "'clinic-99'", "ann, bob, cy, dee"):
        run.models("clinic-99")
    opened = data.open(seed=1)
    theirs = opened.tensors("client-0002")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in opened.tensors("cy").items())
    with telling(DataError, "'clinic-99'", "ann, bob, cy, dee"):
        opened.tensors("clinic-99")
    model = fedloom.load(run.folder).models("cy")
    assert model(torch.tensor(people()["cy"][0])).shape == (30, 2)
    # Arrays in a file give the same partition: the command line creates it, too.
    e = of(run.folder / "experiment.yaml")
    assert make_partition(e).manifest.fingerprint == data.open(seed=e.seed).manifest.fingerprint


def test_a_worker_does_not_need_the_dataset(tmp_path: Path) -> None:
    data = fedloom.Federated.from_arrays(people(), root=tmp_path)
    reported = of(TASK, data=data).shared_json()
    assert str(tmp_path) not in reported
    assert from_shared_json(reported).data.dataset == "arrays"


def test_given_splits_are_kept(tmp_path: Path) -> None:
    given = {
        name: {"train_x": x[:20], "train_y": y[:20], "test_x": x[20:], "test_y": y[20:]}
        for name, (x, y) in people().items()
    }
    manifest = fedloom.Federated.from_arrays(given, root=tmp_path).open().manifest
    assert {entry.test for entry in manifest.clients} == {10}
    assert {entry.train + entry.validation for entry in manifest.clients} == {20}


X, Y = RNG.normal(size=(6, 3)), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("clients", "classes", "output"),
    [
        ({}, None, ("clients", "empty", "dict")),
        ([(X, Y)], None, ("list", "dict")),
        ({"a": X}, None, ("client a", "(x, y)", "ndarray")),
        ({"a": (X, Y[:5])}, None, ("client a: y", "[5]", "[6]")),
        ({"a": (X, Y), "b": (X[:, :2], Y)}, None, ("client b: x", "[6, 2]", "[n, 3]")),
        ({"a": (X, Y)}, ("p", "q"), ("unknown label", "0 to 1", "2 places", "client a: y[2]: 2")),
        ({"a": (X, Y - 1)}, ("p", "q", "r"), ("unknown label", "0 to 2", "2 places", "client a: y[0]: -1")),
        (
            {"a": (X, Y), "b": (X, np.array([0, 1, 2, 0, 255, 2]))},
            list("pqr"),
            ("0 to 2", "1 place", "client b: y[4]: 255"),
        ),
        (
            {"a": (np.where(np.arange(18).reshape(6, 3) == 7, np.nan, X), Y)},
            None,
            ("finite", "client a: x[2, 1]", "nan"),
        ),
        ({"a": (X, Y * 0.5)}, ("p", "q", "r"), ("unknown label", "0 to 2", "2 places", "client a: y[1]", "0.5")),
        ({"a": (X, Y * 10)}, ("0", "10", "20"), ("unknown label", "0 to 2", "4 places", "client a: y[1]: 10")),
        ({"a": (X, ["p", "q", "nan", "p", "q", "NaN"])}, None, ("label missing", "2 places", "client a: y[2]")),
        ({"a": (X[:, :0], Y)}, None, ("client a: x", "[6, 0]")),
        ({"a": (X * 1j, Y)}, None, ("client a: x", "complex128")),
        ({"a": (X, Y), "b": (X, np.array(list("pqrpqr")))}, None, ("<U1", "int64", "names")),
        ({"a": (np.ma.masked_less(X, 0), Y)}, None, ("client a: x", "mask")),
        ({"a": (np.arange(18).reshape(6, 3) + 2**53 - 9, Y)}, None, ("client a: x", "2^53")),
        ({"a": (X, ["p", "q", "r", "p", "q", "s"])}, ("p", "q", "r"), ("unknown label", "p, q, r", "'s'")),
        ({"a": (np.array(["p"] * 6), Y)}, None, ("client a: x", "<U1", "uint8")),
        ({"a": ([[1, 2], [3]], [0, 1])}, None, ("client a: x",)),
        ({"a": {"train_x": X, "train_y": Y}}, None, ("client a", "train_x", "test_x")),
        ({"a": (X[:0], Y[:0])}, None, ("no examples",)),
        ({"a": (np.zeros((6, 8, 8, 3), np.uint8), Y)}, None, ("client a: x", "[8, 8, 3]", "transpose(0, 3, 1, 2)")),
        ({"a": (X, Y), "b": (X[:0], Y[:0])}, None, ("client b", "no examples")),
        ({"a": (X, Y), "a ": (X, Y)}, None, ("clients", "'a'", "twice")),
        ({"caf\u00e9": (X, Y), "cafe\u0301": (X, Y)}, None, ("clients", "'caf\u00e9'", "twice")),
        ({"a": {"x": X, "y": Y, "val_x": X, "val_y": Y}}, None, ("client a", "val_x, val_y", "validation_x")),
        ({"a": (np.array(3.0), np.array(1))}, None, ("client a: x", "[]")),
        ({"a": (X, Y)}, "pqr", ("classes", "'pqr'", "list")),
        ({"a": (X, Y)}, 3, ("classes", "3", "list")),
        ({"a": (X, Y)}, [], ("classes", "[]")),
        ({"a": (X, Y)}, ["p", "q", "p"], ("classes", "'p'", "twice")),
        ({"a": (X, Y)}, ["p", "caf\u00e9", "cafe\u0301"], ("classes", "'caf\u00e9'", "twice")),
        ({"a": (X, Y)}, ["p", None, "q"], ("classes", "None")),
        ({"a": (X, Y)}, [("p", "q"), ("r",), ("s",)], ("classes", "tuple")),
    ],
)
def test_invalid_arrays_are_named(clients: Any, classes: Any, output: tuple[str, ...], tmp_path: Path) -> None:
    with telling(DataError, *output):
        fedloom.Federated.from_arrays(clients, classes=classes, root=tmp_path)
    assert not list(tmp_path.glob("datasets/arrays-*"))


def test_class_names_follow_the_labels(tmp_path: Path) -> None:
    for classes in ([5, 6, 7], np.array([5, 6, 7]), ["5 ", "6", "7"]):
        data = fedloom.Federated.from_arrays(
            {"a": (np.tile(X, (9, 1)) + np.arange(54)[:, None], np.tile(Y, 9))}, classes=classes, root=tmp_path
        )
        assert data.open().manifest.spec.class_names == ("5", "6", "7")


def test_arrays_from_a_file_equal_those_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Grey images without a channel axis, and train and test alone; unused arrays are reported."""
    x, y = RNG.integers(0, 256, (60, 4, 4), dtype=np.uint8), np.arange(60) % 2
    given = {"train_x": x[:48], "train_y": y[:48], "test_x": x[48:], "test_y": y[48:]}
    np.savez(tmp_path / "t.npz", **given, ids=np.arange(60))
    dealt = {"scheme": "iid", "clients": 2}
    with caplog.at_level(logging.WARNING, "fedloom.data"):
        file = fedloom.Federated(
            {
                "dataset": "arrays",
                "root": str(tmp_path),
                "source": {"path": str(tmp_path / "t.npz")},
                "partition": dealt,
            }
        ).open()
    assert sum(tells(record.getMessage(), "t.npz", "ignored", "ids") for record in caplog.records) == 1
    memory = fedloom.Federated.from_arrays({"a": given}, partition=dealt, root=tmp_path).open()
    assert file.manifest.spec.input_shape == (1, 4, 4)
    assert [entry.sha256 for entry in file.manifest.clients] == [entry.sha256 for entry in memory.manifest.clients]


@pytest.mark.parametrize("section", ["mnist", None, [("dataset", "mnist")]])
def test_a_section_that_is_not_a_mapping_is_rejected(section: Any) -> None:
    with telling(ExperimentError, "section", repr(section), "from_arrays"):
        fedloom.Federated(section)


def frame() -> pandas.DataFrame:
    rows = [
        {"height": x[0], "weight": x[1], "age": x[2], "kind": "pq"[label], "hospital": name}
        for name, (xs, ys) in people().items()
        for x, label in zip(xs, ys, strict=True)
    ]
    return pandas.DataFrame(rows)


def test_a_frame_a_table_and_arrays_give_equal_data(tmp_path: Path) -> None:
    reported = fedloom.Federated.from_frame(frame(), client="hospital", label="kind", root=tmp_path)
    named = {name: (x, ["pq"[label] for label in y]) for name, (x, y) in people().items()}
    arrays = fedloom.Federated.from_arrays(named, root=tmp_path)
    assert reported.section == arrays.section
    frame().to_csv(tmp_path / "t.csv", index=False)
    frame().to_parquet(tmp_path / "t.parquet")
    shards = [[entry.sha256 for entry in reported.open().manifest.clients]]
    for file in ("t.csv", "t.parquet"):
        source = {"path": str(tmp_path / file), "label": "kind", "client": "hospital"}
        data = {"dataset": "table", "source": source, "root": str(tmp_path), "partition": {"scheme": "natural"}}
        manifest = make_partition(of(TASK, data=data)).manifest
        assert manifest.spec.class_names == ("p", "q")
        shards.append([entry.sha256 for entry in manifest.clients])
    assert shards[0] == shards[1] == shards[2]


def test_columns_need_no_names_and_integers_become_codes(tmp_path: Path) -> None:
    named = frame().assign(kind=lambda rows: (rows["kind"] == "q").astype(int))
    reported = fedloom.Federated.from_frame(named, client="hospital", label="kind", root=tmp_path)
    assert reported.open().manifest.spec.class_names == ("0", "1")
    floats = named.assign(kind=named["kind"].astype(float))  # as pandas stores them if one was missing
    assert (
        fedloom.Federated.from_frame(floats, client="hospital", label="kind", root=tmp_path).section == reported.section
    )
    numbered = named.set_axis(range(named.shape[1]), axis=1)  # as in a frame made from an array
    again = fedloom.Federated.from_frame(numbered, client="4", label="3", root=tmp_path)
    assert again.section == reported.section


def test_errors_of_a_frame_or_table_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = frame()
    hole = good.copy()
    hole.loc[3, "age"] = float("nan")
    holes = good.assign(age=pandas.array([None if row in (3, 5) else 1 for row in range(len(good))], dtype="Int64"))
    dosed = good.drop(columns="kind").assign(dose=[str(0.5)] * len(good))
    dealt = {"scheme": "iid", "clients": 2}
    frames: list[tuple[Any, dict[str, Any], type[Exception], tuple[str, ...]]] = [
        (good, {"label": "sort"}, DataError, ("'sort'", "label", "height", "kind")),
        (good, {"client": "city"}, DataError, ("'city'", "client", "hospital")),
        (good, {"client": None}, ExperimentError, ("client", "scheme")),
        (good, {"client": None, "scheme": dealt}, DataError, ("numeric", "hospital: ")),
        (good, {"client": None, "scheme": "iid"}, ExperimentError, ("scheme", "mapping", "'iid'")),
        (hole, {}, DataError, ("value missing", "1 place", "row 3, column age")),
        (holes, {}, DataError, ("value missing", "2 places", "row 3, column age", "row 5, column age")),
        ({"age": [1]}, {"client": "age"}, DataError, ("DataFrame", "dict")),
        (pandas.concat([good, good[["age"]]], axis=1), {}, DataError, ("two columns", "'age'")),
        (dosed, {"label": "dose"}, DataError, ("measured", f"{len(good)} places", "row 0: 0.5")),
    ]
    for rows, how, kind, facts in frames:
        with telling(kind, *facts):
            fedloom.Federated.from_frame(rows, **{"client": "hospital", "label": "kind", **how}, root=tmp_path)
    good.to_csv(tmp_path / "t.csv", index=False)
    sections: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"dataset": "table"}, ("data.source", "missing")),
        (
            {"dataset": "table", "source": {"path": str(tmp_path / "no.csv")}},
            ("data.source.path", str(tmp_path / "no.csv"), "exist"),
        ),
        ({"dataset": "folder", "source": {"path": str(tmp_path / "t.csv")}}, ("data.source.path", "folder")),
        ({"dataset": "table", "source": {"path": str(tmp_path / "t.csv"), "colour": 1}}, ("data.source.colour",)),
        ({"dataset": "mnist", "source": {"path": "x"}}, ("data.source", "table", "mnist")),
    ]
    for section, output in sections:
        with telling(ExperimentError, *output):
            of(TASK, data={**section, "root": str(tmp_path), "partition": {"scheme": "natural"}})
    for source, output in (
        ({}, ("no column 'label'", "data.source.label", "kind")),
        ({"label": "sort"}, ("no column 'sort'", "data.source.label", "height", "kind")),
        ({"label": "kind", "client": "city"}, ("no column 'city'", "data.source.client", "height")),
        ({"label": "kind", "split": "part"}, ("no column 'part'", "data.source.split", "height")),
        ({"label": "kind"}, ("not a number", "column hospital: 'ann'", "data.source.client")),
    ):
        with telling(DataError, *output) as reported:
            section = {"dataset": "table", "source": {"path": str(tmp_path / "t.csv"), **source}, "root": str(tmp_path)}
            of(TASK, data={**section, "partition": {"scheme": "iid", "clients": 2}})
        assert "--" not in str(reported.value)
    monkeypatch.chdir(tmp_path)
    with telling(ExperimentError, "data.source.path", tmp_path / "no.csv", "exist"):
        of(TASK, data={"dataset": "table", "source": {"path": "no.csv"}, "partition": {"scheme": "natural"}})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    random = np.random.default_rng(2)
    for owner in ("eve", "fay", "gil"):
        for label in ("cat", "dog"):
            folder = tmp_path / "images" / owner / label
            folder.mkdir(parents=True)
            for i in range(12):
                Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "images"


def test_an_image_folder_by_owner_and_class_or_by_class(images: Path, tmp_path: Path) -> None:
    data = {"dataset": "folder", "root": str(tmp_path / "data"), "held_out_fraction": 0.0, "validation_fraction": 0.4}
    owned = {**data, "source": {"path": str(images), "client": "folder"}, "partition": {"scheme": "natural"}}
    run = fedloom.run(TASK, data=owned, out=tmp_path / "run", report=False, progress=False)
    assert sorted(run.clients["owner"]) == ["eve", "fay", "gil"]
    manifest = make_partition(run.experiment).manifest
    assert (manifest.spec.class_names, manifest.spec.input_shape, manifest.spec.kind) == (
        ("cat", "dog"),
        (3, 6, 6),
        "pixels",
    )
    one = {**data, "source": {"path": str(images / "eve")}}
    dealt = make_partition(of(TASK, data={**one, "partition": {"scheme": "iid", "clients": 2}})).manifest
    assert sum(entry.train + entry.validation + entry.test for entry in dealt.clients) <= 24
    with telling(ExperimentError, "data.partition", "natural"):
        make_partition(of(TASK, data={**one, "partition": {"scheme": "natural"}}))
    before = dealt.fingerprint
    (images / "eve" / "cat" / "0.png").unlink()
    after = make_partition(of(TASK, data={**one, "partition": {"scheme": "iid", "clients": 2}})).manifest
    assert after.fingerprint != before
    (images / "eve" / "cat" / "1.png").write_bytes(b"no image")
    with telling(DataError, "damaged image", "1.png"):
        of(TASK, data={**one, "partition": {"scheme": "iid", "clients": 2}})


class Pictures:
    """Data set in torchvision's form: a length, indexing, classes."""

    classes = ("a", "b")

    def __init__(self, change: Any = None) -> None:
        self._pixels = np.random.default_rng(3).integers(0, 256, (200, 6, 6), dtype=np.uint8)
        self._change = change

    def __len__(self) -> int:
        return 200

    def __getitem__(self, place: int) -> tuple[Any, int]:
        image: Any = Image.fromarray(self._pixels[place])
        return (image if self._change is None else self._change(image)), place % 2


def test_a_torchvision_dataset_is_partitioned(tmp_path: Path) -> None:
    from torchvision import transforms

    scheme = {"scheme": "iid", "clients": 4}
    plain = fedloom.Federated.from_torchvision(Pictures(), scheme, root=tmp_path, held_out_fraction=0.25)
    scaled = fedloom.Federated.from_torchvision(
        Pictures(transforms.ToTensor()), scheme, root=tmp_path, held_out_fraction=0.25
    )
    assert plain.section == scaled.section
    manifest = plain.open().manifest
    assert (manifest.spec.class_names, manifest.spec.input_shape, len(manifest.clients)) == (("a", "b"), (1, 6, 6), 4)
    halves = fedloom.Federated.from_torchvision(Pictures(), scheme, test=Pictures(), root=tmp_path).open().manifest
    assert sum(entry.test for entry in halves.clients) > 180
    turned = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    with telling(DataError, "dataset[0]", "transform"):
        fedloom.Federated.from_torchvision(Pictures(turned), scheme, root=tmp_path)
    with telling(DataError, "dataset", "int"):
        fedloom.Federated.from_torchvision(3, scheme, root=tmp_path)
    with telling(ExperimentError, "scheme", "mapping", "'iid'"):
        fedloom.Federated.from_torchvision(Pictures(), "iid", root=tmp_path)  # type: ignore[arg-type]
    with telling(ExperimentError, "data.partition"):
        of(TASK, data=fedloom.Federated.from_torchvision(Pictures(), {"scheme": "odd"}, root=tmp_path))


def test_errors_in_the_section_are_reported_when_it_is_opened(tmp_path: Path) -> None:
    with telling(ExperimentError, "held_out_fracton", "held_out_fraction?"):
        fedloom.Federated.from_arrays(people(), root=tmp_path, held_out_fracton=0.2).open()
    with telling(ExperimentError, "partition.scheme", "dirichlet?", "dirichlt"):
        fedloom.Federated.from_arrays(people(), root=tmp_path, partition={"scheme": "dirichlt"}).open()
