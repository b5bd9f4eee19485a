"""``fedloom data pack``: one client's folder, from every format, and errors with their position."""

from __future__ import annotations

import csv
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from PIL import Image

import fedloom
from fedloom.core import digests
from fedloom.data.federated import FederatedDataset, OwnDataset
from fedloom.data.moments import Moments, moments_of, pooled_normalization
from fedloom.data.own import Own, OwnClients, own_manifest, read_card
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.spec import DataSpec, InputSpec, Normalization
from fedloom.errors import DataError, ExitCode, ExperimentError

TABLE = Own(kind="features", input_shape=(3,), classes=("no", "yes", "perhaps"))
PIXELS = Own(kind="pixels", input_shape=(1, 4, 5), classes=("cat", "dog"))
TOKENS = Own(kind="tokens", input_shape=(4,), classes=tuple("abc \n"))


def settings(own: Own | None = None, **changes: Any) -> PackSettings:
    request = {key: changes.pop(key) for key in ("labelled", "label", "split", "resize") if key in changes}
    return PackSettings(
        id="a-1",
        request=Request(None if own is None else own.spec, features=own and own.features, **request),
        **changes,
    )


def refusal(source: Path, own: Own | None = None, **changes: Any) -> str:
    """Return the message of a rejected packing, which leaves no files behind."""
    out = source.parent / "packed" / "client"
    with pytest.raises(DataError) as caught:
        pack(source, out, settings(own, **changes))
    assert caught.value.exit_code is ExitCode.DATA
    assert not out.parent.exists()
    return str(caught.value)


def shard(folder: Path) -> dict[str, NDArray[Any]]:
    return safetensors.numpy.load_file(folder / "shard.safetensors")


def joined(folder: Path, what: str) -> NDArray[Any]:
    tensors = shard(folder)
    return np.concatenate([tensors[f"{split}_{what}"] for split in ("train", "validation", "test")])


def rows_of(n: int = 60) -> tuple[NDArray[np.float32], list[str]]:
    generator = np.random.default_rng(3)
    x = generator.normal(5, 2, (n, 3)).astype(np.float32)
    return x, [TABLE.classes[i % 3] for i in range(n)]


def write_csv(
    path: Path, x: NDArray[np.float32], y: Sequence[str], header: Sequence[str] = ("u", "v", "w", "label")
) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([*map(repr, map(float, row)), label] for row, label in zip(x, y, strict=True))
    return path


def write_parquet(path: Path, x: NDArray[np.float32], y: Sequence[str]) -> Path:
    columns = {name: x[:, i] for i, name in enumerate("uvw")}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "label": list(y)}), path)
    return path


def write_npz(path: Path, x: NDArray[np.float32], y: Sequence[str]) -> Path:
    np.savez(path, x=x, y=np.array(y))
    return path


def write_safetensors(path: Path, x: NDArray[np.float32], y: Sequence[str]) -> Path:
    safetensors.numpy.save_file({"x": x, "y": np.array([TABLE.classes.index(label) for label in y])}, path)
    return path


WRITERS: dict[str, Callable[..., Path]] = {
    "t.csv": write_csv,
    "t.parquet": write_parquet,
    "t.npz": write_npz,
    "t.safetensors": write_safetensors,
}


@pytest.mark.parametrize("name", WRITERS)
def test_equal_examples_in_every_format_give_equal_shards(name: str, tmp_path: Path) -> None:
    x, y = rows_of()
    packed = pack(WRITERS[name](tmp_path / name, x, y), tmp_path / "out", settings(TABLE))
    reference = pack(write_csv(tmp_path / "again.csv", x, y), tmp_path / "reference", settings(TABLE))
    assert packed.card.sha256 == reference.card.sha256
    assert (packed.card.train, packed.card.validation, packed.card.test) == (40, 8, 12)
    assert packed.card.class_counts["test"] == (4, 4, 4)
    tensors = shard(tmp_path / "out")
    assert {tuple(row) for split in ("train", "validation", "test") for row in tensors[f"{split}_x"]} == set(
        map(tuple, x)
    )
    assert packed.card == read_card(tmp_path / "out")
    assert packed.card.features == (("u", "v", "w") if name in ("t.csv", "t.parquet") else None)


def test_packing_is_deterministic_and_depends_on_the_seed(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", *rows_of())
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack(source, tmp_path / name, settings(TABLE, seed=seed))
    for file in ("client.json", "shard.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()


def test_only_the_owner_can_read_a_packed_folder(tmp_path: Path) -> None:
    pack(write_csv(tmp_path / "t.csv", *rows_of()), tmp_path / "deep" / "out", settings(TABLE))
    out = tmp_path / "deep" / "out"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o600}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_packed_examples_are_normalized_when_read(tmp_path: Path) -> None:
    x, y = rows_of()
    pack(write_csv(tmp_path / "t.csv", x, y), tmp_path / "out", settings(TABLE))
    clients = OwnClients.open([tmp_path / "out"])
    clients.check(TABLE)
    dataset = OwnDataset(clients, own_manifest(TABLE, clients.entries, 1, clients.measured(TABLE)))
    dataset.verify()
    data = dataset.client("a-1")
    assert np.allclose(data.train.x.mean(0), 0, atol=1e-6)
    assert np.allclose(data.train.x.std(0, correction=0), 1, atol=1e-6)
    assert data.present.all()


def test_without_an_experiment_kind_shape_and_classes_are_inferred(tmp_path: Path) -> None:
    x, _ = rows_of(12)
    card = pack(write_csv(tmp_path / "t.csv", x, ["10", "9", "2"] * 4), tmp_path / "out", settings()).card
    assert (card.spec.kind, card.spec.input_shape, card.spec.class_names) == ("features", (3,), ("2", "9", "10"))


def test_columns_are_selected_by_the_experiments_names(tmp_path: Path) -> None:
    x, y = rows_of()
    own = TABLE.model_copy(update={"features": ("w", "u"), "input_shape": (2,)})
    packed = pack(write_csv(tmp_path / "t.csv", x, y), tmp_path / "out", settings(own))
    assert {tuple(row) for row in joined(tmp_path / "out", "x")} == set(map(tuple, x[:, [2, 0]]))
    assert tells(packed.notes[0], "v")
    source = write_csv(tmp_path / "less.csv", x[:, :2], y, ("u", "v", "label"))
    assert tells(refusal(source, own), "less.csv", "'w'", "data.own.features", "u, v, label")


def test_unlabelled_examples(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=rows_of()[0])
    assert tells(refusal(tmp_path / "t.npz", TABLE), "t.npz", "x", "y", "unlabelled")
    card = pack(tmp_path / "t.npz", tmp_path / "out", settings(TABLE, labelled=False)).card
    assert not card.labelled
    assert card.class_counts["train"] == (0, 0, 0)
    assert set(shard(tmp_path / "out")) == {"train_x", "validation_x", "test_x"}


# --- splits -----------------------------------------------------------------------------------------------------------


def test_equal_inputs_are_in_one_split(tmp_path: Path) -> None:
    x, y = rows_of(30)
    packed = pack(write_csv(tmp_path / "t.csv", np.tile(x, (4, 1)), y * 4), tmp_path / "out", settings(TABLE))
    tensors = shard(tmp_path / "out")
    splits = [{tuple(row) for row in tensors[f"{split}_x"]} for split in ("train", "validation", "test")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 30
    assert tells(packed.notes[0], 90)


def test_splits_given_by_the_source(tmp_path: Path) -> None:
    x, y = rows_of(30)
    part = ["train"] * 20 + ["val"] * 4 + ["test"] * 6
    columns = {name: x[:, i] for i, name in enumerate("uvw")}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "label": y, "part": part}), tmp_path / "t.parquet")
    card = pack(tmp_path / "t.parquet", tmp_path / "table", settings(TABLE, split="part")).card
    assert (card.train, card.validation, card.test) == (20, 4, 6)
    assert np.array_equal(joined(tmp_path / "table", "x"), x)
    cuts = dict(zip(("train", "validation", "test"), (slice(0, 20), slice(20, 24), slice(24, 30)), strict=True))
    codes = np.array([TABLE.classes.index(label) for label in y])
    given = {f"{name}_{what}": whole[cut] for name, cut in cuts.items() for what, whole in (("x", x), ("y", codes))}
    safetensors.numpy.save_file(given, tmp_path / "t.safetensors")
    assert pack(tmp_path / "t.safetensors", tmp_path / "arrays", settings(TABLE)).card.sha256 == card.sha256
    assert card.division == {"given": True}


def test_an_input_in_two_given_splits_is_rejected_with_both_positions(tmp_path: Path) -> None:
    x, y = rows_of(30)
    x[[25, 28]] = x[[3, 4]]
    codes = np.array([TABLE.classes.index(label) for label in y])
    cuts = {"train": slice(0, 20), "validation": slice(20, 24), "test": slice(24, 30)}
    np.savez(
        tmp_path / "t.npz",
        **{f"{name}_{what}": whole[cut] for name, cut in cuts.items() for what, whole in (("x", x), ("y", codes))},
    )
    assert tells(refusal(tmp_path / "t.npz", TABLE), "2 errors", "test_x[1] (test)", "train_x[3] (train)", "test_x[4]")


def test_too_few_examples_for_three_splits(tmp_path: Path) -> None:
    x, y = rows_of(9)
    source = write_csv(tmp_path / "t.csv", np.tile(x[:2], (5, 1)), y[:2] * 5)
    assert tells(refusal(source, TABLE), "10 examples", "train")


def test_a_text_is_split_by_time_without_shared_characters(tmp_path: Path) -> None:
    text = "abc cab bac\n" * 20
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    card = pack(tmp_path / "t.txt", tmp_path / "out", settings(TOKENS)).card
    tensors = shard(tmp_path / "out")
    spell = lambda codes: "".join(TOKENS.classes[int(code)] for code in codes)  # noqa: E731
    assert [spell(row) for row in tensors["train_x"]] == [text[i : i + 4] for i in range(card.train)]
    assert spell(tensors["train_y"]) == text[4 : card.train + 4]
    first_validation = len(text) - 4 - card.test - 4 - card.validation
    assert card.train + 4 <= first_validation
    assert spell(tensors["test_y"]) == text[-card.test :]


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/scan.dcm", "a/SCAN.NII.GZ", "a/IM0001", "images/1.nii"])
def test_medical_images_are_rejected_with_packages_that_read_them(name: str, tmp_path: Path) -> None:
    root = tmp_path / "scans"
    (root / name).parent.mkdir(parents=True)
    (root / "masks").mkdir()
    (root / name).write_bytes(bytes(128) + b"DICM")
    for use in (
        lambda: pack(root, tmp_path / "out", settings()),
        lambda: pack(root / name, tmp_path / "out", settings()),
        lambda: make_data(dataset="folder", path=root, root=tmp_path),
        lambda: make_data(dataset="arrays", path=root / name, root=tmp_path),
    ):
        with pytest.raises((DataError, ExperimentError)) as caught:
            use()
        assert tells(str(caught.value.hint), "pydicom", "nibabel", "x", "y", "from_arrays")


def make_data(dataset: str, path: Path, root: Path) -> FederatedDataset:
    """Return the partition of two clients that a local data set makes."""
    data = {"dataset": dataset, "source": {"path": str(path)}, "root": str(root)}
    return fedloom.Federated({**data, "partition": {"scheme": "iid", "clients": 2}}).open()


def images(root: Path, splits: Sequence[str] = ("",), each: int = 6, size: tuple[int, int] = (5, 4)) -> Path:
    generator = np.random.default_rng(1)
    for split in splits:
        for name in PIXELS.classes:
            folder = root / split / name / "deep"
            folder.mkdir(parents=True)
            for i in range(each):
                values = generator.integers(0, 256, (size[1], size[0]), dtype=np.uint8)
                Image.fromarray(values).save(folder / f"{i}.png")
    return root


def test_images_by_class(tmp_path: Path) -> None:
    root = images(tmp_path / "pictures")
    (root / "cat" / ".DS_Store").write_bytes(b"not looked at")
    colour = np.random.default_rng(2).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(colour).save(root / "dog" / "colour.png")
    packed = pack(root, tmp_path / "out", settings(PIXELS))
    assert packed.card.source == "images"
    assert sum(packed.card.class_counts["train"]) + packed.card.validation + packed.card.test == 13
    inputs = {row.tobytes() for row in joined(tmp_path / "out", "x")}
    assert np.asarray(Image.open(root / "cat" / "deep" / "2.png")).tobytes() in inputs
    assert np.asarray(Image.open(root / "dog" / "colour.png").convert("L")).tobytes() in inputs
    assert tells(packed.notes[0], 1, "RGB", "L")
    found = pack(root, tmp_path / "found", settings()).card
    assert (found.spec.input_shape, found.spec.class_names) == ((3, 4, 5), ("cat", "dog"))  # some of them have colours


def test_all_invalid_images_are_named_and_counted(tmp_path: Path) -> None:
    root = images(tmp_path / "pictures")
    (root / "cat" / "notes.txt").write_text("not an image")
    whole = (root / "cat" / "deep" / "0.png").read_bytes()
    (root / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "cow").mkdir()
    (root / "cow" / "1.png").write_bytes(whole)
    (root / "2.png").write_bytes(whole)
    Image.fromarray(np.zeros((6, 5), dtype=np.uint8)).save(root / "dog" / "tall.png")
    Image.fromarray(np.zeros((4, 5), dtype=np.int32)).save(root / "dog" / "deep.tiff")
    os.mkfifo(root / "dog" / "pipe.png")
    output = refusal(root, PIXELS)
    assert tells(output, "7 errors")
    for facts in (
        ("not a file", "pipe.png"),
        ("not an image", "notes.txt"),
        ("damaged", "cut.png"),
        ("unknown class", "cat, dog", "cow/1.png"),
        ("label missing", "2.png"),
        ("4 x 5", "resize", "tall.png", "6 x 5"),
        ("8 bits", "deep.tiff"),
    ):
        assert tells(output, *facts)


def test_images_are_resized_on_request(tmp_path: Path) -> None:
    packed = pack(images(tmp_path / "p", size=(9, 7)), tmp_path / "out", settings(PIXELS, resize=True))
    assert packed.card.spec.input_shape == (1, 4, 5)
    assert tells(packed.notes[0], 12, "4 x 5")


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert tells(refusal(tmp_path / "empty", PIXELS), "empty", "CLASS")


# --- damaged tables ---------------------------------------------------------------------------------------------------


def changed(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")


def test_all_invalid_table_values_are_named_with_line_and_count(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", *rows_of())
    for line, text in {
        3: "1,2,3,",
        5: "1,abc,3,no",
        8: "1,,3,no",
        13: "1,2,no",
        21: "1,2,nan,no",
        22: "1,2,inf,no",
        31: "1,2,1e39,yes",
        41: "1,2,3,maybe",
        42: "1,2,3,never",
    }.items():
        changed(source, line, text)
    output = refusal(source, TABLE)
    assert tells(output, "t.csv", "9 errors", "nothing was written")
    for facts in (
        ("label missing", 1, "line 3"),
        ("unknown label", "no, yes, perhaps", 2, "line 41", "maybe", "line 42", "never"),
        ("not a number", 1, "line 5, column v", "abc"),
        ("value missing", 1, "line 8, column v"),
        ("cells", 4, 1, "line 13", 3),
        ("finite", 2, "line 21, column w", "nan", "line 22", "inf"),
        ("too large", 1, "line 31, column w"),
    ):
        assert tells(output, *facts)


def test_many_errors_of_a_kind_are_counted_and_the_first_named(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", rows_of(6000)[0], ["other"] * 6000)
    output = refusal(source, TABLE)
    assert tells(output, "6,000", "line 2", "line 6", "...")
    assert "line 7" not in output
    assert len(output) < 2000


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", ("first line",)),
        (b"1,2,3,0\n1,2,3,1\n", ("numbers",)),
        (b"u;v;w;label\n1;2;3;no\n", ("u;v;w;label", "commas")),
        (b"u,v,u,label\n", ("'u'",)),
        (b"u,v,w,class\n", ("'label'", "(label)", "u, v, w, class")),
        (b"u,v,label\n1,2,no\n", (2, "data.own", 3, "input_shape [3]")),
        (b"u,v,w,label\n" + 59 * b"1,2,3,no\n" + b"1,2,\xff,no\n", ("UTF-8", "line 61")),
        (b"u,v,label,\n1,2,no,\n", ("column 4 of 4",)),
        (b'u,v,w,label\n1,2,3,no\n1,2,"3,no\n', ("malformed CSV", "line")),
        (b"u,v,w,label\n", ("no examples",)),
        (b"u,v,w,label\n" + b"1" * 200_000 + b",2,3,no\n", ("malformed CSV", "line 1:", "131072")),
    ],
)
def test_a_file_that_is_not_csv(content: bytes, facts: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert tells(refusal(tmp_path / "t.csv", TABLE), "t.csv", *facts)


def test_errors_name_command_line_options(tmp_path: Path, fedloom: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "t.csv").write_text("u,v,class\n1,2,no\n")
    packed = ("data", "pack", str(tmp_path / "t.csv"), "--out", str(tmp_path / "out"))
    for more, facts in (
        ((), ("'label'", "--set label")),
        (("--set", "label=class", "--set", "split=part"), ("'part'", "--set split")),
    ):
        code, _, output = fedloom(*packed, *more)
        assert code == ExitCode.DATA
        assert tells(output, *facts, "u, v, class")


def test_byte_order_mark_spaces_and_quotes_in_csv(tmp_path: Path) -> None:
    lines = "\n".join(f'{i}, 2 ,"3.5", {"yes" if i % 2 else "no"} ' for i in range(20))
    (tmp_path / "t.csv").write_text(f"u,v,w, label\n{lines}\n\n", encoding="utf-8-sig")
    assert pack(tmp_path / "t.csv", tmp_path / "out", settings(TABLE)).card.train == 13


def test_pixels_and_tokens_of_a_table_are_whole_numbers_in_range(tmp_path: Path) -> None:
    own = Own(kind="pixels", input_shape=(1, 1, 3), classes=TABLE.classes)
    x, y = np.arange(90, dtype=np.float32).reshape(30, 3), rows_of(30)[1]
    source = write_csv(tmp_path / "t.csv", x, y)
    assert pack(source, tmp_path / "out", settings(own)).card.spec.kind == "pixels"
    changed(source, 4, "256,-1,0.5,no")
    assert tells(refusal(source, own), "3 errors", "0 to 255", "line 4, column u: 256", "column v: -1", "0.5")
    tokens = Own(kind="tokens", input_shape=(3,), classes=TABLE.classes)
    assert tells(refusal(source, tokens), "0 to 2", "line 3")


def test_a_damaged_parquet_file_and_invalid_values(tmp_path: Path) -> None:
    x, y = rows_of()
    source = write_parquet(tmp_path / "t.parquet", x, y)
    source.write_bytes(source.read_bytes()[:-200])
    assert tells(refusal(source, TABLE), "t.parquet", "Parquet")
    first = pyarrow.array([1.5, None, math.nan, 2.0] * 3)
    table = pyarrow.table({"u": first, "v": [1] * 12, "w": [2] * 12, "label": ["no", "yes", None, "why"] * 3})
    pyarrow.parquet.write_table(table, source)
    output = refusal(source, TABLE)
    assert tells(output, "12 errors")
    assert tells(output, "value missing", 3, "row 2, column u")
    assert tells(output, "finite", 3, "row 3, column u")
    assert tells(output, "label missing", 3, "row 3")
    assert tells(output, "unknown label", 3, "row 4", "why")
    pyarrow.parquet.write_table(pyarrow.table({"u": ["a"], "v": [1], "w": [2], "label": ["no"]}), source)
    assert tells(refusal(source, TABLE), "numeric", "u: string")


# --- damaged arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"x": np.zeros((9, 3), np.float32)}, ("x", "y", "unlabelled")),
        ({"x": np.zeros((9, 4), np.float32), "y": np.zeros(9, np.int64)}, ("[9, 4]", "[n, 3]")),
        ({"x": np.zeros((9, 3), np.float32), "y": np.zeros(8, np.int64)}, ("y", "[8]", "[9]")),
        ({"x": np.zeros((9, 3), np.float32), "y": np.full(9, 0.7)}, ("unknown label", "0 to 2", 9, "y[0]", "0.7")),
        ({"x": np.zeros((9, 3), np.float32), "y": np.zeros(9, np.bool_)}, ("unknown label", 9, "y[0]", "False")),
        ({"x": np.full((9, 3), 2**53 + 1), "y": np.zeros(9, np.int64)}, ("x", "2^53")),
        ({"x": np.zeros((9, 3), np.float32), "y": np.arange(-1, 8)}, ("0 to 2", 6, "y[0]: -1", "y[4]: 3")),
        ({"x": np.full((9, 3), np.nan, np.float32), "y": np.zeros(9, np.int64)}, ("finite", 27, "x[0, 0]: nan")),
        ({"x": np.full((9, 3), 1e300), "y": np.zeros(9, np.int64)}, ("too large", 27, "x[0, 0]")),
    ],
)
def test_unsupported_arrays(tensors: dict[str, NDArray[Any]], facts: tuple[object, ...], tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "t.safetensors")
    for name in ("t.npz", "t.safetensors"):
        assert tells(refusal(tmp_path / name, TABLE), name, *facts)


def test_files_without_arrays(tmp_path: Path) -> None:
    for name in ("t.npz", "t.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 nothing of the kind")
        assert tells(refusal(tmp_path / name, TABLE), name)
    np.savez(tmp_path / "t.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    assert tells(refusal(tmp_path / "t.npz", TABLE), "t.npz")


def test_a_text_with_unknown_characters_or_too_short(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc\nabXc\nY" + "abc " * 20, encoding="utf-8")
    assert tells(refusal(tmp_path / "t.txt", TOKENS), "2 errors", "data.own.classes", "line 2: 'X'", "line 3: 'Y'")
    (tmp_path / "t.txt").write_text("abc", encoding="utf-8")
    assert tells(refusal(tmp_path / "t.txt", TOKENS), "3 characters", 4)


# --- options ----------------------------------------------------------------------------------------------------------


def test_invalid_options(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "t.csv", *rows_of())
    (tmp_path / "there").mkdir()
    (tmp_path / "t.doc").write_text("")
    for changes, out, source_given, facts in (
        ({"id": "../x"}, "out", source, ("id", "../x")),
        ({"id": None}, "out", tmp_path / "t 1.csv", ("id", "t 1")),
        ({"test_fraction": 1.0}, "out", source, ("test_fraction", "between 0 and 1", 1)),
        ({"validation_fraction": 0.0}, "out", source, ("validation_fraction", 0)),
        ({}, "there", source, ("out", "new folder", "there")),
        ({}, "out", tmp_path / "t.doc", ("t.doc", ".csv", ".npz")),
    ):
        with pytest.raises(ExperimentError) as caught:
            pack(source_given, tmp_path / out, PackSettings(**{"id": "a", "request": Request(TABLE.spec), **changes}))
        assert tells(str(caught.value), *facts)
    with pytest.raises(DataError, match="does not exist"):
        pack(tmp_path / "absent.csv", tmp_path / "out", settings(TABLE))


# --- packed folders ---------------------------------------------------------------------------------------------------


def test_a_damaged_card_or_shard_is_rejected_by_name(tmp_path: Path) -> None:
    pack(write_csv(tmp_path / "t.csv", *rows_of()), tmp_path / "out", settings(TABLE))
    path = tmp_path / "out" / "client.json"
    whole = path.read_bytes()
    card = {key: value for key, value in json.loads(whole).items() if key != "digest"}
    for at in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=r"client\.json.*damaged"):
            read_card(tmp_path / "out")
    for key, value in (
        ("spec", {"inputs": {"": {"kind": "sound", "shape": [3]}}}), ("id", "../a"),
        ("test", -1), ("sha256", "0"),
        ("moments", {"count": 40, "sum": [1, 2]}),
    ):  # fmt: skip
        path.write_text(digests.with_compact_digest(json.dumps({**card, key: value})))
        with pytest.raises(DataError) as caught:
            read_card(tmp_path / "out")
        assert tells(str(caught.value), "client.json", "damaged", key, "fedloom data pack")
    path.write_text(digests.with_compact_digest(json.dumps({**card, "version": 1})))
    with pytest.raises(DataError) as caught:
        read_card(tmp_path / "out")
    assert tells(str(caught.value), "client.json", "version", 1, "fedloom data pack")
    path.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_card(tmp_path / "out")
    path.write_bytes(whole)
    (tmp_path / "out" / "shard.safetensors").write_bytes(b"")
    clients = OwnClients.open([tmp_path / "out"])
    dataset = OwnDataset(clients, own_manifest(TABLE, clients.entries, 1, clients.measured(TABLE)))
    with pytest.raises(DataError, match=r"shard\.safetensors.*damaged"):
        dataset.verify()
    for file in ("client.json", "shard.safetensors"):
        (tmp_path / "out" / file).unlink()
        os.mkfifo(tmp_path / "out" / file)
    with pytest.raises(DataError, match=r"client\.json"):
        read_card(tmp_path / "out")
    with pytest.raises(DataError, match=r"shard\.safetensors"):
        dataset.verify()


def test_clients_that_contradict_each_other_or_the_experiment(tmp_path: Path) -> None:
    x, y = rows_of()
    source = write_csv(tmp_path / "t.csv", x, y)
    pack(source, tmp_path / "all" / "a", settings(TABLE))
    pack(
        source,
        tmp_path / "other",
        PackSettings(id="b", request=Request(TABLE.model_copy(update={"classes": ("yes", "no", "perhaps")}).spec)),
    )
    pack(source, tmp_path / "same", settings(TABLE))
    (tmp_path / "bare").mkdir()
    for data, facts in (
        ([tmp_path / "all", tmp_path / "other"], ("other", "classes", "yes, no", "no, yes")),
        ([tmp_path / "all", tmp_path / "same"], ("'a-1'", "all/a", "same", "id")),
        ([tmp_path / "nowhere"], ("nowhere",)),
        ([tmp_path / "bare"], ("client.json",)),
        ([], ("no packed client",)),
    ):
        with pytest.raises(DataError) as caught:
            OwnClients.open(data)
        assert tells(str(caught.value), *facts)
    with pytest.raises(DataError) as caught:
        OwnClients.open([tmp_path / "all"]).check(TABLE.model_copy(update={"input_shape": (4,)}))
    assert tells(str(caught.value), "input_shape", "[3]", "data.own", "[4]")


def test_renamed_or_reordered_columns_are_rejected(tmp_path: Path) -> None:
    x, y = rows_of()
    for name in WRITERS:
        pack(WRITERS[name](tmp_path / name, x, y), tmp_path / "packed" / name, settings(TABLE))
        clients = OwnClients.open([tmp_path / "packed" / name])
        clients.check(TABLE)
        clients.check(TABLE.model_copy(update={"features": ("u", "v", "w")}))
        other = TABLE.model_copy(update={"features": ("v", "u", "w")})
        if name in ("t.npz", "t.safetensors"):  # their columns have no names
            clients.check(other)
            continue
        with pytest.raises(DataError) as caught:
            clients.check(other)
        assert tells(str(caught.value), name, "features", "u, v, w", "data.own.features", "v, u, w", "--experiment")


# --- moments ----------------------------------------------------------------------------------------------------------


def _pooled(spec: InputSpec, *clients: NDArray[Any]) -> Normalization:
    specs = {"": spec}
    spec = DataSpec(specs)
    return pooled_normalization(spec.measured, [moments_of(x, None, spec) for x in clients])


@given(
    st.lists(
        arrays(np.float32, st.tuples(st.integers(1, 9), st.just(2)), elements=st.floats(-1e6, 1e6, width=32)),
        min_size=1,
        max_size=4,
    )
)
def test_moments_of_clients_combine_to_those_of_all_examples(clients: list[NDArray[np.float32]]) -> None:
    found = _pooled(InputSpec("features", (2,)), *clients)
    whole = np.concatenate(clients).astype(np.float64)
    spread = np.abs(whole).max() + 1
    assert np.allclose(found.mean, whole.mean(0), rtol=0, atol=1e-12 * spread)
    expected = whole.std(0)
    assert np.allclose(found.std, np.where(np.array(found.std) == 1.0, found.std, expected), rtol=0, atol=1e-7 * spread)


def test_moments_of_pixels_are_exact_for_any_division() -> None:
    x = np.random.default_rng(5).integers(0, 256, (50, 2, 3, 3), dtype=np.uint8)
    apart = _pooled(InputSpec("pixels", (2, 3, 3)), x[:7], x[7:])
    assert apart == _pooled(InputSpec("pixels", (2, 3, 3)), x)
    assert np.allclose(apart.mean, (x / 255).mean((0, 2, 3)))
    assert np.allclose(apart.std, (x / 255).std((0, 2, 3)))
    assert pooled_normalization([InputSpec("pixels", (1, 2, 2))], [Moments(4, (40,), (400,))]).std == (1.0,)
