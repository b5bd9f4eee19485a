"""Examples that a partition reserves for new clients, and recognition of new clients."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from test_partition import SPLITS, labels, official
from vowel_runs import on_vowels

from fedloom.cli.runs import evaluate_command as evaluate
from fedloom.data.assignment import Assignment, PartitionSettings, assign_examples
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import Manifest, read_manifest
from fedloom.data.overlap import apart_by_reserve, overlap
from fedloom.data.partition import find_partition, partition_dataset
from fedloom.data.scheme_base import Reserve, reserved_classes
from fedloom.data.schemes import Scheme
from fedloom.errors import ExperimentError

CLASSES = 3
WHOLE = official(labels([40, 50, 60]), labels([20, 10, 30]))
SCHEMES: tuple[dict[str, Any], ...] = (
    {"scheme": "iid", "clients": 4},
    {"scheme": "dirichlet", "clients": 4, "alpha": 5.0},
    {"scheme": "classes", "clients": 3, "classes_per_client": 2},
    {"scheme": "dominant", "clients": 3, "rho": 0.5},
    {"scheme": "imbalanced", "clients": 3, "large_size": 12, "small_size": 4},
    {"scheme": "fixed", "clients": 3, "train_per_class": 3, "test_per_class": 2, "labels_per_client": 2},
)


def scheme_of(keys: dict[str, Any]) -> Scheme:
    scheme: Scheme = TypeAdapter(Scheme).validate_python(keys)
    return scheme


def dealt(keys: dict[str, Any], seed: int) -> Assignment:
    return assign_examples(WHOLE, CLASSES, PartitionSettings(scheme_of(keys), seed, 0.25, 0.3))


def positions(of: Assignment) -> set[int]:
    return {int(i) for split in SPLITS for hand in of.examples[split] for i in hand}


@pytest.mark.parametrize("size", [{"share": 0.5}, {"count": 20}])
@pytest.mark.parametrize("keys", SCHEMES)
def test_reserved_examples_are_assigned_to_no_client_for_any_seed_and_scheme(
    keys: dict[str, Any], size: dict[str, Any]
) -> None:
    trained = [dealt({**keys, "reserve": size}, seed) for seed in (1, 2)]
    new = [dealt({**other, "reserve": {**size, "deal": True}}, seed) for other in SCHEMES for seed in (1, 7)]
    for one, other in product(trained, new):
        assert not positions(one) & positions(other)
    assert len({deal.reserved for deal in (*trained, *new)}) == 1
    assert len(set(map(frozenset, map(positions, new)))) > 2  # the seed still affects the assignment


def test_a_reserve_is_a_fraction_of_each_class_of_train_and_test() -> None:
    def by_class(counts: list[int], first: int = 0) -> list[NDArray[np.int64]]:
        return list(np.split(np.arange(sum(counts)) + first, np.cumsum(counts)[:-1]))

    train, test = by_class([40, 50, 61]), by_class([20, 10, 30], 151)
    group, sizes = np.arange(211), {}
    for name, reserve in {"share": Reserve(share=0.1), "count": Reserve(count=10)}.items():
        rest = reserved_classes(train, test, reserve, group)
        back = reserved_classes(train, test, reserve.model_copy(update={"deal": True}), group)
        sizes[name] = [[len(members) for members in side] for side in back[:2]]
        for of_rest, of_back, whole in zip([*rest[0], *rest[1]], [*back[0], *back[1]], [*train, *test], strict=True):
            assert sorted([*of_rest, *of_back]) == whole.tolist()
            assert of_rest.tolist() == sorted(of_rest)
        assert rest[2] == back[2]
        assert back[2].examples == sum(map(sum, sizes[name]))
    assert sizes == {"share": [[4, 5, 6], [2, 1, 3]], "count": [[10, 10, 10], [5, 2, 5]]}
    more = reserved_classes(train, test, Reserve(share=0.4, deal=True), group)
    less = reserved_classes(train, test, Reserve(share=0.1, deal=True), group)
    assert all(set(small) <= set(large) for i in (0, 1) for small, large in zip(less[i], more[i], strict=True))


def test_without_the_key_the_manifest_does_not_mention_a_reserve(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"scheme": "iid", "clients": 4}
    assert "reserve" not in scheme_of(keys).model_dump(mode="json")
    assert "reserve" not in scheme_of({**keys, "reserve": None}).model_dump(mode="json")
    written = scheme_of({**keys, "reserve": {"share": 0.2}}).model_dump(mode="json")
    assert written["reserve"] == {"share": 0.2, "count": None, "deal": False}
    assert scheme_of(written) == scheme_of({**keys, "reserve": {"share": 0.2}})


@pytest.mark.parametrize(
    ("reserve", "output"),
    [
        ({}, r"share is None, count is None"),
        ({"share": 0.1, "count": 3}, r"share is 0.1, count is 3"),
        ({"share": 1.0}, r"less than 1"),
        ({"count": 0}, r"greater than or equal to 1"),
    ],
)
def test_a_reserve_without_a_size_is_rejected(reserve: dict[str, Any], output: str) -> None:
    with pytest.raises(ValidationError, match=output):
        scheme_of({"scheme": "iid", "clients": 4, "reserve": reserve})


def test_a_reserve_of_everything_is_rejected() -> None:
    with pytest.raises(ExperimentError, match=r"reserve\.count: 40 .*\b40\b.*class 0"):
        dealt({"scheme": "iid", "clients": 4, "reserve": {"count": 40}}, 1)


# --- new clients and known ones ---------------------------------------------------------------------------------------


def vowels(root: Path, seed: int, **keys: Any) -> FederatedDataset:
    """Return a partition of the vowel data by speaker, or of its utterances."""
    data = root / "datasets" / "vowel"
    if not data.exists():
        data.mkdir(parents=True)
        shutil.copy(Path(__file__).parents[1] / "fixtures" / "Vowel.rda", data)
    scheme = scheme_of({"scheme": "natural", **keys})
    folder = partition_dataset("vowel", PartitionSettings(scheme, seed, 0.2, 1 / 6), root=root)
    return FederatedDataset.open(folder)


def test_owners_are_reserved_whole(tmp_path: Path) -> None:
    everyone = {entry.owner for entry in vowels(tmp_path, 1).manifest.clients}
    trained = [vowels(tmp_path, seed, reserve={"count": 5}) for seed in (1, 2)]
    new = vowels(tmp_path, 3, reserve={"count": 5, "deal": True})
    owners = {entry.owner for entry in new.manifest.clients}
    assert len(owners) == 5
    for dataset in trained:
        assert {entry.owner for entry in dataset.manifest.clients} == everyone - owners
        assert apart_by_reserve(dataset.manifest, new.manifest) is not None
        found = overlap(dataset, new)
        assert (found.train, found.validation, found.test, found.clients) == (0, 0, 0, 0)
        assert not found.any
    assert apart_by_reserve(trained[0].manifest, trained[1].manifest) is None
    larger = vowels(tmp_path, 3, reserve={"count": 6, "deal": True})
    assert apart_by_reserve(trained[0].manifest, larger.manifest) is None
    with pytest.raises(ExperimentError, match=r"reserve\.count: 15 .* 15 owners"):
        vowels(tmp_path, 1, reserve={"count": 15})


def test_an_overlap_is_counted_per_example(tmp_path: Path) -> None:
    trained = vowels(tmp_path, 1, scheme="iid", clients=4, train_per_client=60)
    new = vowels(tmp_path, 2, scheme="iid", clients=5, train_per_client=30)
    found = overlap(trained, new)

    def rows(dataset: FederatedDataset, client: str, split: str) -> set[tuple[float, ...]]:
        tensors = dataset.tensors(client)
        return {(*x, y) for x, y in zip(tensors[f"{split}_x"].tolist(), tensors[f"{split}_y"].tolist(), strict=True)}

    known = set().union(*(rows(trained, client, "train") for client in trained.manifest.roster))
    clients = [entry.id for entry in new.manifest.clients]
    shared = {split: [len(known & rows(new, client, split)) for client in clients] for split in SPLITS}
    assert (found.train, found.validation, found.test) == tuple(sum(shared[split]) for split in SPLITS)
    assert found.train > 20  # of 150, from a pool with 180 training examples
    assert found.test == 0  # the official test set
    assert found.clients == sum(any(counts) for counts in zip(*shared.values(), strict=True))
    assert found.known_by == "examples"


def test_an_evaluation_states_if_its_clients_are_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = on_vowels(tmp_path, {"name": "fedavg", "local": {"steps": 1}})
    run.run()
    folder, root = run.folder.path, tmp_path / "data"
    reserve = {"count": 5}

    def measured(dataset: FederatedDataset) -> tuple[Any, str]:
        evaluate(folder, partition=str(dataset.folder), out=tmp_path / "e.json")
        statistics = json.loads((tmp_path / "e.json").read_text())
        return statistics["overlap"], capsys.readouterr().err

    again = vowels(root, 5)  # the same speakers
    found, output = measured(again)
    assert found["clients"] >= 12 * 12 // 15
    assert found["train"] > 0
    assert found["known_by"] == "examples"
    assert "reserve" in output
    assert f"{found['train']:,} train" in output
    evaluate(folder, out=tmp_path / "own.json")
    assert "overlap" not in json.loads((tmp_path / "own.json").read_text())
    assert not capsys.readouterr().err
    trained_on = read_manifest(folder)
    there = find_partition(trained_on, root)
    assert there is not None
    shutil.rmtree(there)
    found, output = measured(vowels(root, 5, reserve={**reserve, "deal": True}))
    assert found is None
    assert "unknown" in output
    assert find_partition(trained_on, root) is None


def test_a_manifest_describes_its_reserve(tmp_path: Path) -> None:
    plain = vowels(tmp_path, 1).manifest
    kept = vowels(tmp_path, 1, reserve={"share": 0.3}).manifest
    assert plain.reserved is None
    assert json.loads(plain.to_json())["reserved"] is None
    assert kept.reserved.examples == 5
    assert Manifest.from_json(kept.to_json()) == kept
    assert json.loads(kept.to_json())["reserved"] == {"examples": 5, "sha256": kept.reserved.sha256}
