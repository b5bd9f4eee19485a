"""Datasets that the package ``datasets`` has saved."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from facts import refusing
from PIL import Image

from fedloom.data.federated import FederatedDataset
from fedloom.engine.run_data import make_data
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.sections import Data

try:
    import datasets
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
    with refusing(ExperimentError, "datasets", "install"):
        read(tmp_path, tmp_path / "data")


@needs_datasets
def test_saved_folders_hold_tables_lists_and_images(tmp_path: Path) -> None:
    with refusing(DataError, str(tmp_path)):
        read(tmp_path, tmp_path / "data")
    rows = {"input_ids": TOKENS.tolist(), "attention_mask": np.ones_like(TOKENS).tolist(), "label": CLASSES.tolist()}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "tokens"))
    manifest = read(tmp_path / "tokens", tmp_path).manifest
    assert {name: spec.kind for name, spec in manifest.spec.inputs.items()} == dict.fromkeys(
        ("attention_mask", "input_ids"), "integers"
    )
    pixels = RNG.integers(0, 256, (N, 6, 6, 3), dtype=np.uint8)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["p", "q", "r"])})
    columns = {"image": [Image.fromarray(image) for image in pixels], "label": CLASSES.tolist()}
    made = datasets.Dataset.from_dict(columns, features=kinds)
    datasets.DatasetDict(train=made, test=made.select(range(9))).save_to_disk(str(tmp_path / "images"))
    manifest = read(tmp_path / "images", tmp_path).manifest
    assert (manifest.spec.kind, manifest.spec.class_names) == ("pixels", ("p", "q", "r"))
    frame()[["p", "q", "price"]].pipe(datasets.Dataset.from_pandas).save_to_disk(str(tmp_path / "table"))
    assert read(tmp_path / "table", tmp_path, label="price").manifest.spec.task == "regression"


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
        assert manifest.spec.class_names == ("negative", "NA", "1.0", "unused")
        for entry in manifest.clients:
            assert [count > 0 for count in entry.class_counts["train"]] == [True, True, True, False]
    tags = [[int(token) % 3 for token in row] for row in TOKENS]
    kind = datasets.Sequence(named)
    labelled(tags, kind, **rows).remove_columns("a").save_to_disk(str(tmp_path / "tags"))
    targets = read(tmp_path / "tags", tmp_path).manifest.spec.targets
    assert (targets.task, targets.outputs, targets.names) == ("next_token", 4, ("negative", "NA", "1.0", "unused"))


@needs_datasets
def test_missing_labels_and_other_splits_are_rejected(tmp_path: Path) -> None:
    named = datasets.ClassLabel(names=["no", "yes"])
    whole, holes = labelled([0, 1] * 15, named), labelled([0, 1, -1] * 10, named, 50)
    for name, splits, facts in (
        ("holes", {"train": holes}, ("-1", "10 places", "row 2")),
        ("unlabelled", {"train": whole, "test": labelled([-1] * 30, named, 50)}, ("-1", "30 places")),
        ("twice", {"train": whole, "val": holes, "validation": holes}, ("val, validation", "each once")),
        ("other", {"other": whole}, ("other", "train")),
    ):
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / name))
        with refusing(DataError, *facts):
            read(tmp_path / name, tmp_path / "data")


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
        assert manifest.spec.task == task
        assert {each: spec.high for each, spec in manifest.spec.inputs.items()} == {"attention_mask": 2, "input_ids": 7}
        assert manifest.spec.inputs["input_ids"].tokenizer is not None
    alone = read(tmp_path / "lists", tmp_path / "data", text=text | {"mask": False}).manifest
    assert (alone.spec.kind, alone.spec.inputs[""].high, alone.spec.tokenizer) == (
        "integers",
        7,
        manifest.spec.inputs["input_ids"].tokenizer,
    )
