"""Datasets of the package ``datasets``: saved folders, and those in its local cache, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
from facts import refusing
from PIL import Image

from fedloom.data.federated import FederatedDataset
from fedloom.data.pack import saved
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.sections import Data
from fedloom.runner.run_data import make_data

try:
    import datasets
    from datasets.builder import Key
except ImportError:
    datasets = None
needs_datasets = pytest.mark.skipif(datasets is None, reason="the package datasets is not installed")

N = 60
RNG = np.random.default_rng(35)
CLASSES = np.arange(N) % 3
TOKENS = RNG.integers(0, 700, (N, 5))


def read(path: str | Path, root: Path, **source: Any) -> FederatedDataset:
    """Return the partition of two clients with the source's examples."""
    section = {"dataset": "huggingface", "source": {"path": str(path), **source}, "root": str(root)}
    return make_data(Data.model_validate(section | {"partition": {"scheme": "iid", "clients": 2}}), 1)


def frame(rows: slice = slice(None)) -> pandas.DataFrame:
    """Return numbers, the class that they determine, and a price."""
    numbers = {name: RNG.normal(size=N) for name in ("p", "q")}
    return pandas.DataFrame(numbers | {"price": RNG.normal(100, 3, N), "label": CLASSES})[rows]


@pytest.mark.skipif(datasets is not None, reason="the package datasets is installed")
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, "someone/reviews"):
        with refusing(ExperimentError, "datasets", "install"):
            read(path, tmp_path / "data")


@needs_datasets
def test_saved_folders_hold_tables_lists_and_images(tmp_path: Path) -> None:
    with refusing(DataError, str(tmp_path)):
        read(tmp_path, tmp_path / "data")
    rows = {"input_ids": TOKENS.tolist(), "attention_mask": np.ones_like(TOKENS).tolist(), "label": CLASSES.tolist()}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "tokens"))
    manifest = read(tmp_path / "tokens", tmp_path).manifest
    assert {name: spec.kind for name, spec in manifest.specs.items()} == dict.fromkeys(
        ("attention_mask", "input_ids"), "integers"
    )
    pixels = RNG.integers(0, 256, (N, 6, 6, 3), dtype=np.uint8)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["p", "q", "r"])})
    columns = {"image": [Image.fromarray(image) for image in pixels], "label": CLASSES.tolist()}
    made = datasets.Dataset.from_dict(columns, features=kinds)
    datasets.DatasetDict(train=made, test=made.select(range(9))).save_to_disk(str(tmp_path / "images"))
    manifest = read(tmp_path / "images", tmp_path).manifest
    assert (manifest.kind, manifest.class_names) == ("pixels", ("p", "q", "r"))
    frame()[["p", "q", "price"]].pipe(datasets.Dataset.from_pandas).save_to_disk(str(tmp_path / "table"))
    assert read(tmp_path / "table", tmp_path, label="price").manifest.task == "regression"


def labelled(labels: Any, kind: Any, start: int = 0, **columns: Any) -> Any:
    """Return a table of numbers, different from ``start`` on, with labels of a kind of ``datasets``."""
    columns = {"a": [start + i + 0.5 for i in range(len(labels))], **columns}
    return datasets.Dataset.from_dict(columns | {"label": labels}).cast_column("label", kind)


@needs_datasets
def test_labels_of_columns_and_lists_keep_their_names(tmp_path: Path) -> None:
    named = datasets.ClassLabel(names=["negative", "NA", "1.0", "unused"])
    labelled(CLASSES.tolist(), named).save_to_disk(str(tmp_path / "column"))
    rows = {"input_ids": TOKENS.tolist()}
    labelled(CLASSES.tolist(), named, **rows).remove_columns("a").save_to_disk(str(tmp_path / "lists"))
    for name in ("column", "lists"):
        manifest = read(tmp_path / name, tmp_path).manifest
        assert manifest.class_names == ("negative", "NA", "1.0", "unused")
        for entry in manifest.clients:
            assert [count > 0 for count in entry.class_counts["train"]] == [True, True, True, False]
    tags = [[int(token) % 3 for token in row] for row in TOKENS]
    kind = datasets.Sequence(named)
    labelled(tags, kind, **rows).remove_columns("a").save_to_disk(str(tmp_path / "tags"))
    targets = read(tmp_path / "tags", tmp_path).manifest.targets
    assert targets is not None
    assert (targets.task, targets.outputs, targets.names) == ("next_token", 4, ("negative", "NA", "1.0", "unused"))


@needs_datasets
@pytest.mark.parametrize("mark", [-1, None, "no column"])
def test_splits_without_labels_are_left_out(mark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = datasets.ClassLabel(names=["no", "yes"]), datasets.Value("int64"), datasets.Value("float32")
    for number, kind in enumerate(kinds):
        test = labelled([-1 if mark == "no column" else mark] * 30, kind, start=200)
        splits = {
            "train": labelled([0, 1] * 60, kind),
            "validation": labelled([0, 1] * 15, kind, start=150),
            "test": test.remove_columns("label") if mark == "no column" else test,
        }
        for without in ("none", "validation"):
            path = tmp_path / f"{number} {without}"
            parts = {name: part for name, part in splits.items() if name != without}
            datasets.DatasetDict(parts).save_to_disk(str(path))
            caplog.clear()
            manifest = read(path, tmp_path / "data").manifest
            assert manifest.class_names == (("no", "yes") if number == 0 else ("0", "1"))
            tested = sum(entry.test for entry in manifest.clients)
            assert tested == (30 if without == "none" else 24)  # the validation split, or a fifth


@needs_datasets
def test_a_split_whose_labels_are_all_minus_one_stays_if_training_has_that_label(tmp_path: Path) -> None:
    numbers = datasets.Value("int64")
    splits = {"train": labelled([-1, 1] * 30, numbers), "test": labelled([-1] * 10, numbers, start=100)}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "signs"))
    manifest = read(tmp_path / "signs", tmp_path / "data", task="regression").manifest
    assert sum(entry.test for entry in manifest.clients) == 10


@needs_datasets
def test_missing_labels_among_others_are_rejected(tmp_path: Path) -> None:
    named = datasets.ClassLabel(names=["no", "yes"])
    for labels, facts in (([0, 1, -1] * 10, ("-1", "10 places", "row 2")), ([-1] * 30, ("train", "label"))):
        path = tmp_path / str(len(set(labels)))
        datasets.DatasetDict(train=labelled(labels, named), test=labelled([0, 1], named, 50)).save_to_disk(str(path))
        with refusing(DataError, *facts):
            read(path, tmp_path / "data")


@needs_datasets
def test_texts_of_saved_folders_become_tokens(tmp_path: Path) -> None:
    from test_texts import column, tokenizer_at

    texts = [" ".join((word, *more)) for word in ("good", "bad") for more in product(("very", "film"), repeat=4)]
    text = column(tokenizer_at(tmp_path / "tokenizer")).model_dump()
    rows = {"review": texts, "label": [text[:4] for text in texts], "when": ["today"] * len(texts)}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "one"))
    several = {"review": texts, "label": [[int("good" in text), 1] for text in texts]}
    datasets.Dataset.from_dict(several).save_to_disk(str(tmp_path / "lists"))
    for name, task in (("one", "classification"), ("lists", "multilabel")):
        manifest = read(tmp_path / name, tmp_path / "data", text=text).manifest
        assert manifest.task == task
        assert {each: spec.high for each, spec in manifest.specs.items()} == {"attention_mask": 2, "input_ids": 7}
        assert manifest.specs["input_ids"].tokenizer is not None
    alone = read(tmp_path / "lists", tmp_path / "data", text=text | {"mask": False}).manifest
    assert (alone.kind, alone.high, alone.tokenizer) == ("integers", 7, manifest.specs["input_ids"].tokenizer)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, which ``datasets`` uses without a connection."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def fill(cache: Path, name: str, subset: str = "default", version: str = "1", **splits: pandas.DataFrame) -> None:
    """Put a dataset into the cache, as loading it once does."""

    class Made(datasets.ArrowBasedBuilder):
        def _info(self) -> Any:
            return datasets.DatasetInfo()

        def _split_generators(self, manager: Any) -> list[Any]:
            return [datasets.SplitGenerator(name, {"rows": rows}) for name, rows in splits.items()]

        def _generate_tables(self, rows: pandas.DataFrame) -> Iterator[tuple[Any, pyarrow.Table]]:
            for place, half in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
                yield Key(0, place), pyarrow.Table.from_pandas(half, preserve_index=False)

    named = {"dataset_name": name.split("/")[-1], "repo_id": name, "config_name": subset, "hash": version}
    Made(cache_dir=str(cache), **named).download_and_prepare()


@needs_datasets
def test_a_cached_dataset_is_read_by_its_name(cache: Path, tmp_path: Path) -> None:
    splits = {"train": frame(slice(0, 36)), "test": frame(slice(36, 48)), "unsupervised": frame(slice(48, N))}
    fill(cache, "someone/FarmPrices", **splits)
    assert datasets.load_dataset("someone/FarmPrices")["train"].num_rows == 36  # found by the package itself
    dataset = read("someone/FarmPrices", tmp_path / "data")
    assert sum(entry.test for entry in dataset.manifest.clients) == 12
    assert sum(entry.train + entry.validation for entry in dataset.manifest.clients) == 36
    found = np.concatenate([dataset.tensors(name)["test_x"].numpy() for name in dataset.manifest.roster])
    needed = splits["test"][["p", "q", "price"]].to_numpy(dtype=np.float32)
    assert np.allclose(found[found[:, 0].argsort()], needed[needed[:, 0].argsort()])
    given = saved.cached("someone/FarmPrices")
    assert read(given, tmp_path / "data").manifest.dataset == dataset.manifest.dataset


@needs_datasets
def test_a_new_version_in_the_cache_is_read(cache: Path, tmp_path: Path) -> None:
    fill(cache, "prices", version="1", train=frame())
    old = read("prices", tmp_path / "data").manifest
    fill(cache, "prices", version="2", train=frame())
    newest = max(cache.glob("prices/*/*/2"))
    os.utime(newest, ns=(2**61, 2**61))
    assert saved.cached("prices") == newest
    assert read("prices", tmp_path / "data").manifest.dataset != old.dataset


@needs_datasets
def test_subsets_are_named_and_datasets_not_in_the_cache_are_rejected(cache: Path, tmp_path: Path) -> None:
    with refusing(ExperimentError, "someone/none", cache, "load_dataset"):
        read("someone/none", tmp_path / "data")
    with refusing(ExperimentError, "data.source.path", "some where/else/again"):
        read("some where/else/again", tmp_path / "data")
    for subset in ("wheat", "milk"):
        fill(cache, "someone/farm", subset, train=frame())
    for named in ({}, {"subset": "oats"}):
        with refusing(ExperimentError, "data.source.subset", "milk", "wheat"):
            read("someone/farm", tmp_path / "data", **named)
    assert read("someone/farm", tmp_path / "data", subset="milk").manifest.classes == 3
    fill(cache, "someone/tests", other=frame())
    with refusing(DataError, "other", "train"):
        read("someone/tests", tmp_path / "data")
    with refusing(ExperimentError, "data.source.subset"):
        read(tmp_path, tmp_path / "data", subset="milk")
