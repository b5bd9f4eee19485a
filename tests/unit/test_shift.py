"""Clients whose labels are permuted, or whose images are rotated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from test_reserve import vowels

from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import SPLITS, Manifest
from fedloom.data.overlap import overlap
from fedloom.data.scheme_base import Shift
from fedloom.data.schemes import IidScheme, Scheme
from fedloom.data.spec import DataSpec
from fedloom.errors import ExperimentError

X = np.arange(2 * 1 * 3 * 3, dtype=np.uint8).reshape(2, 1, 3, 3)
Y = np.array([0, 4])


def rows(dataset: FederatedDataset, client: str, split: str) -> list[tuple[Any, int]]:
    tensors = dataset.tensors(client)
    return [(tuple(x), y) for x, y in zip(tensors[f"{split}_x"].tolist(), tensors[f"{split}_y"].tolist(), strict=True)]


@pytest.mark.parametrize("groups", [3, None])
def test_labels_are_permuted_and_assignments_unchanged(tmp_path: Path, groups: int | None) -> None:
    plain = vowels(tmp_path, 1, scheme="iid", clients=6)
    shifted = vowels(tmp_path, 1, scheme="iid", clients=6, shift={"kind": "labels", "groups": groups})
    manifest = shifted.manifest
    assert manifest.shift_groups is not None
    assert plain.manifest.shift_groups is None
    shift = Shift(kind="labels", groups=groups)
    used = set()
    for entry, group in zip(manifest.clients, manifest.shift_groups, strict=True):
        to = shift.permutation(group, manifest.spec.classes, manifest.seed)
        assert sorted(to) == list(range(manifest.spec.classes))
        used.add(tuple(to))
        for split in SPLITS:
            before, after = rows(plain, entry.id, split), rows(shifted, entry.id, split)
            assert [(x, int(to[y])) for x, y in before] == after
            counts = np.bincount([y for _, y in after], minlength=manifest.spec.classes)
            assert entry.class_counts[split] == tuple(counts)
    assert len(used) == (groups or 6)
    assert (tuple(range(manifest.spec.classes)) in used) == (groups is not None)  # the first group keeps its labels


def test_groups_are_even_and_the_same_for_every_seed(tmp_path: Path) -> None:
    shift = Shift(kind="labels", groups=4)
    one, other = shift.deal(200, 1), shift.deal(200, 2)
    assert one != other
    assert [one.count(g) for g in range(4)] == [50] * 4
    assert (shift.permutation(2, 10, 1) == shift.permutation(2, 10, 2)).all()
    own = Shift(kind="labels")
    assert (own.permutation(2, 10, 1) != own.permutation(2, 10, 2)).any()


def test_images_are_rotated() -> None:
    half, quarter = Shift(kind="rotation", groups=2), Shift(kind="rotation", groups=4)
    for shift, group, turns in ((half, 1, 2), (quarter, 1, 1), (quarter, 3, 3), (quarter, 0, 0)):
        x, y = shift.shifted(X, Y, group, 10, 1)
        assert (x[1, 0] == np.rot90(X[1, 0], turns)).all()
        assert x.dtype == X.dtype
        assert (y == Y).all()
        back, _ = shift.undone(x, y, group, 10, 1)
        assert (back == X).all()


def test_an_overlap_is_found_despite_a_shift(tmp_path: Path) -> None:
    trained = vowels(tmp_path, 1, scheme="iid", clients=4, train_per_client=60)
    shifted = vowels(tmp_path, 1, scheme="iid", clients=4, train_per_client=60, shift={"kind": "labels"})
    new = vowels(tmp_path, 2, scheme="iid", clients=5, train_per_client=30, shift={"kind": "labels", "groups": 2})
    assert overlap(trained, new) == overlap(shifted, new)
    assert overlap(trained, new).train > 20


def test_partitions_without_a_shift_keep_their_names() -> None:
    written = IidScheme(clients=3).model_dump(mode="json")
    assert "shift" not in written
    assert IidScheme(clients=3, shift=Shift(kind="labels")).model_dump(mode="json")["shift"] == {
        "kind": "labels",
        "groups": None,
    }


def test_a_manifest_has_a_group_for_each_client(tmp_path: Path) -> None:
    text = vowels(tmp_path, 1, scheme="iid", clients=3, shift={"kind": "labels"}).manifest.to_json()
    assert Manifest.from_json(text).to_json() == text


@pytest.mark.parametrize(
    ("shift", "output"),
    [
        ({"kind": "colour"}, "'labels' or 'rotation'"),
        ({"kind": "labels", "groups": 1}, "greater than or equal to 2"),
        ({"kind": "rotation"}, "groups: None .* 2 or 4"),
        ({"kind": "rotation", "groups": 3}, "groups: 3 .* 2 or 4"),
    ],
)
def test_an_invalid_shift_is_rejected(shift: dict[str, Any], output: str) -> None:
    with pytest.raises(ValidationError, match=output):
        TypeAdapter(Scheme).validate_python({"scheme": "iid", "clients": 4, "shift": shift})


@pytest.mark.parametrize(
    ("shift", "kind", "shape", "output"),
    [
        ({"kind": "labels"}, "tokens", (80,), r"shift\.kind: labels of tokens"),
        ({"kind": "rotation", "groups": 2}, "features", (10,), r"shift\.kind: rotation .* features"),
        ({"kind": "rotation", "groups": 4}, "pixels", (1, 4, 6), r"shift\.groups: 4 .* 4x6"),
    ],
)
def test_inputs_that_cannot_be_shifted_are_rejected(
    shift: dict[str, Any], kind: str, shape: tuple[int, ...], output: str
) -> None:
    with pytest.raises(ExperimentError, match=output):
        IidScheme(clients=2, shift=Shift.model_validate(shift)).check_data(DataSpec.single(kind, shape, ("a", "b")))
    IidScheme(clients=2, shift=Shift(kind="rotation", groups=2)).check_data(
        DataSpec.single("pixels", (1, 4, 6), ("a", "b"))
    )


def test_an_experiment_reports_a_shift_error_at_its_key(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"rotation .* features"):
        vowels(tmp_path, 1, scheme="iid", clients=3, shift={"kind": "rotation", "groups": 2})
