"""Values from tables, from arrays, or in memory: the same rules at every entry point."""

from __future__ import annotations

import gzip
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from facts import refusing, tells
from torch import nn

import fedloom
from fedloom.data.datasets.base import FetchFailed
from fedloom.data.datasets.locations import uncompressed
from fedloom.data.newcomer import Newcomer
from fedloom.data.own import Own, OwnClients
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.problem import Problem
from fedloom.data.spec import DataSpec, Normalization
from fedloom.data.values import as_numbers, number
from fedloom.engine.run_data import make_partition
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import of
from fedloom.models.factories import FACTORIES
from fedloom.models.module_facts import check_codes
from fedloom.models.registry import ModuleSettings

DEALT = {"scheme": "iid", "clients": 2}
TASK: dict[str, Any] = {
    "name": "values",
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg", "local": {"steps": 1}},
    "federation": {"rounds": 1, "clients_per_round": 2},
    "runtime": {"workers": 0},
}
N = 60


def table(label: Any, **columns: Any) -> pandas.DataFrame:
    """Write a table of 60 rows with a measured column beside the given ones."""
    random = np.random.default_rng(0)
    return pandas.DataFrame({"a": random.normal(size=N).round(3), **columns, "label": label})


def of_csv(frame: pandas.DataFrame, folder: Path) -> Any:
    frame.to_csv(folder / "t.csv", index=False)
    return _of_file("table", folder / "t.csv")


def of_parquet(frame: pandas.DataFrame, folder: Path) -> Any:
    frame.to_parquet(folder / "t.parquet", index=False)
    return _of_file("table", folder / "t.parquet")


def of_npz(frame: pandas.DataFrame, folder: Path) -> Any:
    np.savez(folder / "t.npz", **_arrays(frame))
    return _of_file("arrays", folder / "t.npz")


def of_frame(frame: pandas.DataFrame, folder: Path) -> Any:
    data = fedloom.Federated.from_frame(frame, label="label", scheme=DEALT, root=folder)
    return data.open().manifest, data.open()


def of_arrays(frame: pandas.DataFrame, folder: Path) -> Any:
    given = _arrays(frame)
    half = {name: (given["x"][part], given["y"][part]) for name, part in (("p", slice(0, 30)), ("q", slice(30, N)))}
    data = fedloom.Federated.from_arrays(half, root=folder)
    return data.open().manifest, data.open()


def _arrays(frame: pandas.DataFrame) -> dict[str, Any]:
    y = frame["label"].to_numpy()
    return {"x": frame.drop(columns="label").to_numpy(), "y": y.astype(str) if y.dtype == object else y}


def _of_file(dataset: str, path: Path) -> Any:
    data = {"dataset": dataset, "source": {"path": str(path)}, "root": str(path.parent), "partition": DEALT}
    opened = make_partition(of(TASK, data=data))
    return opened.manifest, opened


ENTRANCES: tuple[Callable[[pandas.DataFrame, Path], Any], ...] = (of_csv, of_parquet, of_npz, of_frame, of_arrays)


def values(opened: Any, column: int) -> set[float]:
    """Return the distinct values of a feature, over all clients and splits."""
    shards = [opened.tensors(entry.id) for entry in opened.manifest.clients]
    return {float(v) for shard in shards for key in shard if key.endswith("_x") for v in shard[key][:, column]}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("label", "classes"),
    [
        (np.arange(N) % 3 + 1, ("1", "2", "3")),
        (np.arange(N) % 2 * 10 + 10, ("10", "20")),
        (np.arange(N) % 2 * 2.0, ("0", "2")),
        (np.arange(N) % 2 * 2 - 1, ("-1", "1")),
        (np.where(np.arange(N) % 2, 2**62, 3), ("3", str(2**62))),
        (np.where(np.arange(N) % 2, np.uint64(2**64 - 1), np.uint64(3)), ("3", str(2**64 - 1))),
        (np.arange(N) % 2 == 0, ("False", "True")),
        (np.array([["no", "yes"][i % 2] for i in range(N)], dtype=object), ("no", "yes")),
    ],
)
def test_labels_become_equal_classes_at_every_entry_point(
    entrance: Callable[..., Any], label: Any, classes: tuple[str, ...], tmp_path: Path
) -> None:
    manifest, _ = entrance(table(label), tmp_path)
    assert manifest.spec.class_names == classes
    held = sum(sum(entry.class_counts[split][1] for split in entry.class_counts) for entry in manifest.clients)
    assert abs(held - N // len(classes)) <= 3


BINARY = np.arange(N) % 2
DAYS = pandas.date_range("2024-01-01", periods=N)
NUL = np.array(["no", "yes", "yes\0"], dtype=object)[np.arange(N) % 3]
MARKERS = ("NA", "N/A", "#N/A", "NULL", "null", "None", "<NA>", "nan", "")
MARKED = np.array([(*MARKERS, "yes", "no", "none")[i % (len(MARKERS) + 3)] for i in range(N)], dtype=object)
TABLES = (of_csv, of_parquet, of_frame)


@pytest.mark.parametrize(
    ("entrances", "label", "column", "facts"),
    [
        ((of_frame, of_parquet), DAYS[:2].repeat(30), None, ("label", f"{N} places", "row ", "2024-01-01")),
        (TABLES, NUL, None, ("label", "20 places", repr("yes\0"))),
        (ENTRANCES, MARKED, None, ("45 errors", "label missing", "40 places", "'NA'", "'#N/A'")),
        (TABLES, BINARY, 2**60 + np.arange(N), ("2^53", "column other")),
        ((of_csv,), BINARY, np.array(["True", "2"] * 30, dtype=object), ("1 place", "other")),
        ((of_frame,), BINARY, DAYS, ("numeric", "other: ", "datetime")),
        ((of_frame,), BINARY, pandas.Categorical(["x", "y"] * 30), ("numeric", "other: ", "category")),
        ((of_frame,), BINARY, np.full(N, 1 + 2j), ("numeric", "other: ", "complex")),
    ],
)
def test_labels_and_features_that_are_none_are_rejected_with_their_places(
    entrances: tuple[Callable[..., Any], ...], label: Any, column: Any, facts: tuple[str, ...], tmp_path: Path
) -> None:
    frame = table(label) if column is None else table(label, other=column)
    for entrance in entrances:
        with pytest.raises(DataError) as error:
            entrance(frame, tmp_path)
        assert tells(str(error.value), *facts), entrance


def wanted(classes: tuple[str, ...], mean: tuple[float, ...] = (0.0, 0.0), std: float = 1.0) -> Problem:
    """Return what a run over features with these means and deviations asks of a new client."""
    normalization = Normalization(mean, (std,) * len(mean))
    return Problem("t", DataSpec.single("features", (len(mean),), classes, normalization), clients=1)


FRACTIONS = (np.random.default_rng(1).normal(size=N), np.arange(N) % 2 * 0.7)


@pytest.mark.parametrize(
    ("entrance", "label"),
    [
        *((entrance, label) for entrance in (of_csv, of_parquet) for label in FRACTIONS),
        *((entrance, np.arange(N)) for entrance in ENTRANCES),
    ],
)
def test_a_measured_quantity_is_not_a_class_at_any_entry_point(
    entrance: Callable[..., Any], label: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        entrance(table(label), tmp_path)
    assert tells(str(error.value), "measured", len(set(label)), "task", "regression", "places")


@pytest.mark.parametrize("entrance", [of_npz, of_frame, of_arrays])
@pytest.mark.parametrize("label", FRACTIONS)
def test_typed_numbers_with_fractions_are_regression_targets(
    entrance: Callable[..., Any], label: Any, tmp_path: Path
) -> None:
    manifest, opened = entrance(table(label), tmp_path)
    spec = manifest.spec
    assert (spec.task, spec.classes, spec.targets.shape, spec.outputs) == ("regression", 0, (), 1)
    y = np.concatenate([opened.client(client).train.y.numpy() for client in manifest.roster])
    assert y.mean() == pytest.approx(0, abs=1e-5)
    assert y.std() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_values_indistinguishable_in_32_bits_are_rejected_at_every_entry_point(
    entrance: Callable[..., Any], tmp_path: Path
) -> None:
    label = np.arange(N) % 2
    with pytest.raises(DataError) as error:
        entrance(table(label, time=1_700_000_000 + np.arange(N)), tmp_path)
    assert tells(str(error.value), "32-bit", "1 place", "time" if entrance not in (of_npz, of_arrays) else "[:, 1]")
    with pytest.raises(DataError):
        entrance(table(label, time=1_700_000_000 + np.arange(N) / 8), tmp_path)
    manifest, opened = entrance(table(label, time=1_700_000_000 + 86_400 * 365 * np.arange(N)), tmp_path)
    assert len(values(opened, 1)) == N
    assert manifest.spec.input_shape == (2,)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_rounded_integers_are_reported(
    entrance: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="fedloom.data")
    entrance(table(np.arange(N) % 2, ids=2**24 + 1 + 10**6 * np.arange(N)), tmp_path)
    assert tells(caplog.text, "32-bit", "ids" if entrance not in (of_npz, of_arrays) else "[:, 1]")
    caplog.clear()
    entrance(table(np.arange(N) % 2, ids=2**24 - np.arange(N)), tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("entrance", [of_csv, of_parquet, of_frame])
def test_booleans_become_1_and_0(entrance: Callable[..., Any], tmp_path: Path) -> None:
    smokes = np.arange(N) % 3 == 0
    _, opened = entrance(table(np.arange(N) % 2, smokes=smokes), tmp_path)
    assert values(opened, 1) == {0.0, 1.0}


@pytest.mark.parametrize("kind", ["Int64", "UInt8", "Float32", "boolean"])
def test_nullable_types_are_read_as_numbers_and_missing_values_named(kind: str, tmp_path: Path) -> None:
    whole = pandas.Series([0, 1] * 30).astype(kind)
    _, opened = of_frame(table(np.arange(N) % 2, other=whole), tmp_path)
    assert values(opened, 1) == {0.0, 1.0}
    whole[7] = pandas.NA
    for entrance in (of_frame, of_parquet, of_csv):
        with pytest.raises(DataError) as error:
            entrance(table(np.arange(N) % 2, other=whole), tmp_path)
        assert tells(str(error.value), "missing", "1 place", "column other")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12.0),
        (" 1 ", 1.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("+2E-3", 0.002),
        ("12_34", None),
        ("１２", None),
        ("0x10", None),
        ("", None),
        ("1,5", None),
        ("1e", None),
    ],
)
def test_only_text_in_ascii_digits_is_a_number(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize(("array", "kind"), [(["1"], "<U1"), ([1j], "complex128"), ([None], "object")])
def test_numbers_of_other_types_are_rejected(array: list[Any], kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        as_numbers(np.array(array))


@pytest.mark.parametrize("code", ["12_34", "5\0"])
def test_codes_and_damaged_cells_are_not_numbers(code: str, tmp_path: Path) -> None:
    rows = "\n".join(f"{code if i == 3 else i},{'ny'[i % 2]}" for i in range(N))
    (tmp_path / "t.csv").write_text(f"code,label\n{rows}\n")
    with pytest.raises(DataError) as error:
        pack(tmp_path / "t.csv", tmp_path / "out", PackSettings())
    assert tells(str(error.value), "not a number", "1 place", "line 5, column code", repr(code))


def test_binary_text_of_parquet_is_text(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=N)
    label = [b"no" if i % 2 else "größer".encode() for i in range(N)]
    who = [b"ann" if i < 30 else b"bob" for i in range(N)]
    pyarrow.parquet.write_table(pyarrow.table({"a": x, "label": label, "who": who}), tmp_path / "t.parquet")
    source = {"path": str(tmp_path / "t.parquet"), "client": "who"}
    data = {"dataset": "table", "source": source, "root": str(tmp_path), "partition": {"scheme": "natural"}}
    manifest = make_partition(of(TASK, data=data)).manifest
    assert manifest.spec.class_names == ("größer", "no")
    assert [entry.owner for entry in manifest.clients] == ["ann", "bob"]
    label[4] = b"\xff"
    pyarrow.parquet.write_table(pyarrow.table({"a": x, "label": label}), tmp_path / "u.parquet")
    with pytest.raises(DataError) as error:
        pack(tmp_path / "u.parquet", tmp_path / "out", PackSettings())
    assert tells(str(error.value), "1 place", "row 5", "UTF-8")


def test_an_index_is_not_a_feature_and_unnamed_columns_are_rejected(tmp_path: Path) -> None:
    frame = table(np.repeat([0, 1], 30))
    frame.to_csv(tmp_path / "t.csv")
    frame.sample(frac=1, random_state=0).to_parquet(tmp_path / "t.parquet")
    pandas.read_csv(tmp_path / "t.csv").to_csv(tmp_path / "again.csv", index=False)
    frame.set_index(pandas.Index([*range(200, 260, 2), *range(101, 161, 2)], name="patient")).to_parquet(
        tmp_path / "named.parquet"
    )
    for name, column in (
        ("t.csv", "without a name"),
        ("t.parquet", "__index_level_0__"),
        ("again.csv", "Unnamed: 0"),
        ("named.parquet", "patient"),
    ):
        packed = pack(tmp_path / name, tmp_path / f"out-{name}", PackSettings(id="a"))
        assert packed.card.features == ("a",)
        assert tells(packed.notes[0], "index", column)
    frame.assign(**{"Unnamed: 3": 1.0}).to_csv(tmp_path / "u.csv", index=False)
    with refusing(DataError, "column 3 of 3"):
        pack(tmp_path / "u.csv", tmp_path / "out-u", PackSettings(id="a"))


def test_numbered_columns_are_found_and_multilevel_names_are_rejected(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(N, 4))
    frame = pandas.DataFrame(np.c_[x, np.arange(N) % 2])
    data = fedloom.Federated.from_frame(frame, label=4, scheme=DEALT, root=tmp_path)
    assert data.open().manifest.spec.input_shape == (4,)
    deep = frame.set_axis(pandas.MultiIndex.from_product([["x"], range(5)]), axis=1)
    with refusing(DataError, "2 levels"):
        fedloom.Federated.from_frame(deep, label="x", scheme=DEALT, root=tmp_path)


# --- new clients and packed clients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "y", "positions"),
    [
        (("10", "20"), [20, 10], [1, 0]),
        (("1", "2", "3"), np.array([3.0, 1.0]), [2, 0]),
        (("1", "2", "3"), torch.tensor([2, 3]), [1, 2]),
        (("1", "2", "3"), ["2", "3"], [1, 2]),
        (("no", "yes"), [1, 0], [1, 0]),
        (("False", "True"), [True, False], [1, 0]),
    ],
)
def test_a_new_client_gives_labels_as_in_training(classes: tuple[str, ...], y: Any, positions: list[int]) -> None:
    problem = wanted(classes)
    found = Newcomer.from_arrays("eve", [[1, 2], [3, 4]], y, problem).client("eve").train
    assert found.y.tolist() == positions
    assert found.x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(DataError) as error:
        Newcomer.from_arrays("eve", [[1, 2], [3, 4]], [5, 5], problem)
    assert tells(str(error.value), "unknown label", "2 places", "y[0]", 5)


def test_given_classes_name_label_positions_for_new_clients_too(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(N, 2)), np.arange(N) % 3
    clients = {"ann": (x[:30], y[:30]), "bob": (x[30:], y[30:])}
    classes = ("10", "2", "30")  # folders of these names are sorted like this
    data = fedloom.Federated.from_arrays(clients, classes=classes, root=tmp_path)
    assert data.open().manifest.spec.class_names == classes
    held = [data.open().tensors(who) for who in ("ann", "bob")]
    first = {tuple(row) for row in x[y == 0].astype(np.float32).tolist()}
    for shard in held:
        assert {tuple(row) for row in shard["train_x"][shard["train_y"] == 0].tolist()} <= first
    problem = wanted(classes)
    with pytest.raises(DataError) as error:
        Newcomer.from_arrays("eve", x[:2], [2, 2], problem)  # the class 2, or the third?
    assert tells(str(error.value), "10, 2, 30", "text")
    named = Newcomer.from_arrays("eve", x[:2], ["2", "30"], problem).client("eve").train.y
    assert named.tolist() == [1, 2]


def test_a_new_client_within_the_runs_range_is_accepted(tmp_path: Path) -> None:
    x = 1_700_000_000 + np.arange(20)[:, None]
    problem = wanted(("a", "b"), (1.7e9,), 1e7)
    assert len(Newcomer.from_arrays("eve", x, None, problem).client("eve").train) == 20
    with pytest.raises(DataError, match="32-bit"):
        Newcomer.from_arrays("eve", x, None, wanted(("a", "b"), (1.7e9,), 20.0))
    named = pandas.DataFrame({"weight": [1.0, 2.0]})
    with pytest.raises(DataError) as error:
        Newcomer.from_arrays("eve", named, None, wanted(("a", "b"), (0.0,)), ("age",))
    assert tells(str(error.value), "weight", "age")


def test_a_packed_client_and_a_run_name_classes_equally(tmp_path: Path) -> None:
    for name, y in (("t.npz", np.arange(N) % 2 * 10 + 10), ("u.npz", np.arange(N) % 2)):
        np.savez(tmp_path / name, x=np.random.default_rng(0).normal(size=(N, 2)), y=y)
    problem = wanted(("10", "20", "30"))
    packed = pack(tmp_path / "t.npz", tmp_path / "t", PackSettings(id="t"))
    assert packed.card.spec.class_names == ("10", "20")
    found = Newcomer.from_folder(tmp_path / "t", problem).client("t").train.y
    assert set(found.tolist()) == {0, 1}
    pack(tmp_path / "u.npz", tmp_path / "u", PackSettings(id="u"))
    with pytest.raises(DataError) as error:
        Newcomer.from_folder(tmp_path / "u", problem)
    assert tells(str(error.value), "'0'", "10, 20, 30")


# --- files that are read again, and files that would fill the memory --------------------------------------------------


def test_a_changed_source_behind_a_link_is_read_again(tmp_path: Path) -> None:
    frame = table(np.arange(N) % 2)
    (tmp_path / "real").mkdir()
    frame.to_csv(tmp_path / "real" / "a.csv", index=False)
    (tmp_path / "t.csv").symlink_to(tmp_path / "real" / "a.csv")
    before, _ = _of_file("table", tmp_path / "t.csv")
    about = (tmp_path / "real" / "a.csv").stat()
    text = (tmp_path / "real" / "a.csv").read_text()
    (tmp_path / "real" / "a.csv").write_text(text.replace("0", "1", 1))
    os.utime(tmp_path / "real" / "a.csv", ns=(about.st_atime_ns, about.st_mtime_ns))  # as copying with -p does
    after, _ = _of_file("table", tmp_path / "t.csv")
    assert after.source_sha256 != before.source_sha256


def npz(path: Path, header: dict[str, Any], content: int, claimed: int | None = None) -> Path:
    """Return an npz file whose x has this header, and so many zero bytes; y is valid."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            piece = bytes(2**20)
            for start in range(0, content, len(piece)):
                file.write(piece[: content - start])
        with archive.open("y.npy", "w") as file:
            np.lib.format.write_array(file, np.arange(9))
    return path


@pytest.mark.parametrize("rows", [10**15, -3, 8, 10])
def test_an_array_smaller_than_its_header_states_is_rejected(rows: int, tmp_path: Path) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, 3)}
    with pytest.raises(DataError) as error:
        pack(npz(tmp_path / "t.npz", header, 9 * 12), tmp_path / "out", PackSettings())
    assert tells(str(error.value), "t.npz", "x.npy", rows, 108)


@pytest.mark.slow
def test_a_small_file_that_would_fill_the_memory_is_rejected(tmp_path: Path) -> None:
    rows = 2**30 // 1024 + 1
    header = {"descr": "|u1", "fortran_order": False, "shape": (rows, 1024)}
    with pytest.raises(DataError) as error:
        pack(npz(tmp_path / "t.npz", header, rows * 1024), tmp_path / "out", PackSettings())
    assert tells(str(error.value), "t.npz", "unpacks")
    rows = 2**27
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(rows, dtype=np.int8), [1.0])
    pyarrow.parquet.write_table(pyarrow.table({"label": column}), tmp_path / "t.parquet")
    with pytest.raises(DataError) as error:
        pack(tmp_path / "t.parquet", tmp_path / "out", PackSettings(request=Request(labelled=False)))
    assert tells(str(error.value), "t.parquet", "unpacks")


@pytest.mark.slow
def test_a_small_gzip_file_that_would_fill_the_memory_is_rejected() -> None:
    piece = gzip.compress(bytes(2**26))
    with pytest.raises(FetchFailed) as error:
        uncompressed(piece * 17, "labels.gz")
    assert tells(str(error.value), "labels.gz", f"{2**30:,}")
    assert uncompressed(piece, "labels.gz") == bytes(2**26)


# --- codes of categories ----------------------------------------------------------------------------------------------


class Codes(nn.Module):
    """Module that looks a feature up as a code, or the number of a bucket, in one of torch's ways."""

    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor], way: str = "table") -> None:
        super().__init__()
        self.cut, self.way, self.table, self.out = cut, way, nn.Embedding(50, 4), nn.Linear(4, 3)
        self.widen = nn.Linear(50, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.cut(x[:, 0])
        rows = {
            "table": lambda: self.table(codes),
            "function": lambda: nn.functional.embedding(codes, self.table.weight),
            "index": lambda: self.table.weight[codes],
            "select": lambda: self.table.weight.index_select(0, codes),
            "one_hot": lambda: self.widen(nn.functional.one_hot(codes, 50).float()),
        }[self.way]()
        found: torch.Tensor = self.out(rows)
        return found


def fold(x: torch.Tensor) -> torch.Tensor:
    return x.long() % 50


def bucket(x: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))


@pytest.mark.parametrize("way", ["table", "function", "index", "select", "one_hot"])
def test_codes_taken_from_standardized_features_are_rejected_before_training(way: str) -> None:
    with pytest.raises(ExperimentError) as error:
        check_codes(lambda: nn.Sequential(Codes(fold, way)), (1,))
    assert tells(str(error.value), "model.factory", "'0.table'" if way == "table" else "'0'", "standardized")
    check_codes(lambda: nn.Sequential(Codes(bucket, way)), (1,))


def folded() -> nn.Module:
    """Fold codes into a table."""
    return Codes(fold)


def test_a_factory_that_reads_features_as_codes_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FACTORIES, f"{__name__}:folded")
    with pytest.raises(ExperimentError, match="standardized"):
        ModuleSettings(factory=f"{__name__}:folded").build((1,), 3, "features")


WANTED = wanted(("a", "caf\u00e9"))
FOUR = np.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize(
    ("x", "y", "facts"),
    [
        (np.ma.masked_greater(FOUR, 4), [0, 1, 0, 1], ("x", "mask")),
        (FOUR, np.ma.masked_equal([0, 1, 0, 1], 1), ("y", "mask")),
        (torch.tensor(FOUR).to_sparse(), [0, 1, 0, 1], ("x", "Tensor")),
        (FOUR.astype(str), [0, 1, 0, 1], ("x",)),
        ([[1.0, 2.0], [3.0]], [0, 1], ("x",)),
        (FOUR, [[0], [0, 1], [0], [1]], ("y",)),
        (FOUR, np.array(["a", None, "caf\u00e9", None], dtype=object), ("label missing", "2 places", "y[1]")),
    ],
)
def test_values_that_are_not_arrays_are_rejected_in_training_and_from_new_clients(
    x: Any, y: Any, facts: tuple[str, ...], tmp_path: Path
) -> None:
    uses: tuple[Callable[[], object], ...] = (
        lambda: Newcomer.from_arrays("me", x, y, WANTED),
        lambda: fedloom.Federated.from_arrays({"me": (x, y)}, root=tmp_path),
    )
    for use in uses:
        with pytest.raises(DataError) as error:
            use()
        assert tells(str(error.value), *facts)


def test_cells_that_mark_missing_values_are_no_owners_features_or_targets(tmp_path: Path) -> None:
    cells = ["NA" if i == 7 else str(i % 5) for i in range(N)]
    table(np.arange(N) % 2, cell=cells).to_csv(tmp_path / "t.csv", index=False)
    for request, what in (
        (Request(client="cell"), "client missing"),
        (Request(), "value missing"),
        (Request(targets=("cell",), task="regression"), "value missing"),
    ):
        with pytest.raises(DataError) as error:
            pack(tmp_path / "t.csv", tmp_path / "out", PackSettings(request=request))
        assert tells(str(error.value), what, "1 place", "line 9", "'NA'")


def test_a_given_class_may_have_the_name_of_a_marker(tmp_path: Path) -> None:
    regions = ["NA", "EU"] * 30
    own = Own(kind="features", input_shape=(1,), classes=("NA", "EU"))
    table(regions).to_csv(tmp_path / "t.csv", index=False)
    card = pack(tmp_path / "t.csv", tmp_path / "out", PackSettings(request=Request(own.spec))).card
    assert sum(card.class_counts[split][0] for split in card.class_counts) == N // 2
    given = {"a": (np.random.default_rng(0).normal(size=(N, 1)), regions)}
    data = fedloom.Federated.from_arrays(given, classes=["NA", "EU"], root=tmp_path).open()
    assert data.manifest.spec.class_names == ("NA", "EU")
    found = Newcomer.from_arrays("me", FOUR, regions[:4], wanted(("NA", "EU"))).client("me").train.y
    assert found.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError):
        fedloom.Federated.from_arrays(given, classes=["NA", ""], root=tmp_path)


def test_names_are_found_in_both_unicode_forms(tmp_path: Path) -> None:
    """Check columns of a table, the features that an experiment names, and a new client's labels."""
    composed, apart = "caf\u00e9", "cafe\u0301"
    frame = pandas.DataFrame({apart: np.arange(60.0), apart + "s": ["a", apart] * 30})
    own = Own(kind="features", input_shape=(1,), classes=("a", composed), features=(composed,))
    for name, write in (("t.csv", frame.to_csv), ("t.parquet", frame.to_parquet)):
        write(tmp_path / name, index=False)
        out = tmp_path / f"out {name}"
        request = Request(own.spec, features=own.features, label=composed + "s")
        pack(tmp_path / name, out, PackSettings(id="a", request=request))
        OwnClients.open([out]).check(own)
    data = fedloom.Federated.from_frame(frame, label=composed + "s", scheme=DEALT, root=tmp_path)
    assert data.open().manifest.spec.class_names == ("a", composed)
    for y in ([apart, "a", apart, "a"], np.array([composed, "a"] * 2)):
        found = Newcomer.from_arrays("me", FOUR, y, WANTED).client("me").train.y
        assert found.tolist() == [1, 0, 1, 0]
    twice = pandas.DataFrame({composed: np.arange(60.0), apart: np.arange(60.0), "label": ["a", "b"] * 30})
    with pytest.raises(DataError) as error:
        fedloom.Federated.from_frame(twice, label="label", scheme=DEALT, root=tmp_path)
    assert tells(str(error.value), "two columns", repr(composed))


def test_grey_images_of_a_new_client_need_no_channel_axis() -> None:
    problem = Problem("t", DataSpec.single("pixels", (1, 5, 5), ("a", "b"), Normalization((0.0,), (1.0,))), clients=1)
    found = Newcomer.from_arrays("me", np.zeros((4, 5, 5), np.uint8), None, problem).client("me").train
    assert found.x.shape == (4, 1, 5, 5)
