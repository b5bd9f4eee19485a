"""``dominant``, ``imbalanced`` and ``fixed``: the clients' data stated in the papers, and impossible settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from facts import refusing, tells
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedloom.data import datasets
from fedloom.data.apportion import partition_classes
from fedloom.data.assignment import Assignment, PartitionSettings, assign_examples
from fedloom.data.datasets import Pool, RawDataset
from fedloom.data.scheme_base import MixScheme
from fedloom.data.schemes import ClassesScheme, DominantScheme, FixedScheme, ImbalancedScheme, Scheme
from fedloom.errors import ExitCode, ExperimentError

SEEDS = st.integers(0, 2**63)
FASHION_MNIST = ([6000] * 10, [1000] * 10)
MNIST = (
    [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
)
CIFAR10 = ([5000] * 10, [1000] * 10)


def deal(
    counts: tuple[list[int], list[int]],
    scheme: MixScheme,
    seed: int = 1,
    unseen: float = 0.0,
    validation: float = 1 / 6,
) -> Assignment:
    train, test = (np.repeat(np.arange(len(part)), part) for part in counts)
    official = RawDataset(*(Pool(np.zeros((len(y), 1, 1, 1), dtype=np.uint8), y) for y in (train, test)))
    return assign_examples(official, len(counts[0]), PartitionSettings(scheme, seed, unseen, validation))


def classes_of(dealt: Assignment, split: str, counts: tuple[list[int], list[int]]) -> NDArray[np.int64]:
    """Return the number of examples of each class that each client got, ``[n, C]``."""
    labels = np.concatenate([np.repeat(np.arange(len(part)), part) for part in counts])
    return np.stack([np.bincount(labels[hand], minlength=len(counts[0])) for hand in dealt.examples[split]])


def refusal(counts: tuple[list[int], list[int]], scheme: MixScheme, **how: Any) -> str:
    with pytest.raises(ExperimentError) as error:
        deal(counts, scheme, **how)
    return str(error.value)


# dominant


@pytest.mark.parametrize("clients", [10, 25])
def test_client_i_has_rho_of_class_i_and_equal_shares_of_the_others(clients: int) -> None:
    dealt = deal(CIFAR10, DominantScheme(clients=clients, rho=0.28, train_per_client=900, test_per_client=100))
    for split, size in (("train", 900), ("test", 100)):
        counts = classes_of(dealt, split, CIFAR10)
        for i, row in enumerate(counts):
            assert row.sum() == size
            assert row[i % 10] == round(0.28 * size)
            others = np.delete(row, i % 10)
            assert set(others.tolist()) <= {int(0.08 * size), int(0.08 * size) + 1}


def test_ten_dominant_clients_use_every_example() -> None:
    dealt = deal(CIFAR10, DominantScheme(clients=10, rho=0.28), validation=0.1)
    assert [len(hand) for hand in dealt.examples["test"]] == [1000] * 10
    assert sum(len(hand) for split in dealt.examples.values() for hand in split) == 60000


@pytest.mark.parametrize(("rho", "classes"), [(1.0, 4), (0.25, 4), (1.0, 1)])
def test_rho_ranges_from_even_to_one_class(rho: float, classes: int) -> None:
    counts = ([120] * classes, [40] * classes)
    found = classes_of(deal(counts, DominantScheme(clients=classes, rho=rho)), "train", counts)
    expected = np.eye(classes) * 100 if rho == 1 else np.full((classes, classes), 25)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("rho", [0.05, 0.0, -1.0])
def test_a_class_that_would_not_dominate_is_rejected(rho: float) -> None:
    with pytest.raises(ExperimentError, match=r"data\.partition\.rho: .*1/10.* 0\.1 or more"):
        DominantScheme(clients=4, rho=rho).check(datasets.find_dataset("mnist").spec.classes)


# imbalanced


@pytest.mark.parametrize("mix", [{}, {"dominant_share": 0.5}, {"classes_per_client": 2}])
@pytest.mark.parametrize("counts", [FASHION_MNIST, MNIST])
def test_one_client_has_5000_images_and_nine_have_20(counts: tuple[list[int], list[int]], mix: dict[str, Any]) -> None:
    scheme = ImbalancedScheme(clients=10, **mix)
    dealt = deal(counts, scheme)
    train = classes_of(dealt, "train", counts)
    assert sorted(train.sum(1).tolist()) == [20] * 9 + [5000]
    # The same mix in every split, and enough examples to measure it.
    for split in ("validation", "test"):
        of_split = classes_of(dealt, split, counts)
        assert np.all(of_split.sum(1) >= 200)
        if not mix:
            assert np.all(abs(of_split.sum(1) - of_split.sum() / 10) <= 1)
        for row, own in zip(of_split / of_split.sum(1, keepdims=True), train, strict=True):
            assert np.all(abs(row - own / own.sum()) <= 1 / own.sum() + 1 / of_split.sum(1).min())
    if mix == {"dominant_share": 0.5}:
        assert train.argmax(1).tolist() == list(range(10))
        assert all(abs(row.max() - row.sum() / 2) < 1 and np.ptp(np.sort(row)[:-1]) <= 1 for row in train)
    if mix == {"classes_per_client": 2}:
        assert np.array_equal((train > 0).sum(1), [2] * 10)
        assert all(row[row > 0].tolist() == [row.sum() // 2] * 2 for row in train)
        assert np.array_equal((train > 0).sum(0), [2] * 10)


def test_large_clients_are_drawn_and_one_of_them_is_seen() -> None:
    where = []
    for seed in range(60):
        dealt = deal(([300] * 3, [60] * 3), ImbalancedScheme(clients=10, large_size=100), seed, unseen=0.8)
        large = [len(hand) == 100 for hand in dealt.examples["train"]]
        assert sum(large) == 1
        assert dealt.seen[large.index(True)]
        where.append(large.index(True))
    assert len(set(where)) > 5
    both = ImbalancedScheme(clients=10, large_clients=2, large_size=100)
    unseen_too = 0
    for seed in range(60):
        dealt = deal(([300] * 3, [60] * 3), both, seed, unseen=0.5)
        large_seen = [bool(dealt.seen[i]) for i, hand in enumerate(dealt.examples["train"]) if len(hand) == 100]
        assert len(large_seen) == 2
        assert any(large_seen)
        unseen_too += not all(large_seen)
    assert 10 < unseen_too < 55  # the second is any of the nine others, five of which are unseen


@given(
    n=st.integers(1, 12),
    classes=st.integers(1, 6),
    large=st.integers(1, 12),
    sizes=st.tuples(st.integers(5, 200), st.integers(5, 30)),
    mix=st.sampled_from(["iid", "dominant_share", "classes_per_client"]),
    part=st.floats(0, 1),
    seed=SEEDS,
)
@settings(max_examples=80)
def test_sizes_are_met_exactly_or_rejected(
    n: int, classes: int, large: int, sizes: tuple[int, int], mix: str, part: float, seed: int
) -> None:
    large, (large_size, small_size) = min(large, n), sorted(sizes, reverse=True)
    chosen: dict[str, Any] = {
        "iid": {},
        "dominant_share": {"dominant_share": 1 / classes + part * (1 - 1 / classes)},
        "classes_per_client": {"classes_per_client": 1 + int(part * (min(classes, 5) - 1))},
    }[mix]
    scheme = ImbalancedScheme(clients=n, large_clients=large, large_size=large_size, small_size=small_size, **chosen)
    counts = ([240] * classes, [40] * classes)
    expected = [small_size] * (n - large) + [large_size] * large
    available = 200 * classes
    try:
        found = sorted(len(hand) for hand in deal(counts, scheme, seed).examples["train"])
    except ExperimentError as error:
        refused = str(error)
    else:
        assert found == expected
        return
    assert "data.partition.large_size" in refused
    # If no class is in greater demand than others, all available examples can be used.
    assert chosen or sum(expected) > available or "whole examples" in refused


@pytest.mark.parametrize(
    ("counts", "keys", "words"),
    [
        (([60, 60], [30, 30]), {}, ["5000", "small_size 20", "5,180", "100"]),
        (
            ([300] * 4, [60] * 4),
            {"large_size": 600, "small_size": 10, "dominant_share": 0.7},
            ["needs", "needs 4", "there are 250", "more even mixes"],
        ),
        (
            ([300] * 4, [60] * 4),
            {"large_size": 600, "small_size": 10, "classes_per_client": 2},
            ["needs", "needs 3", "there are 250"],
        ),
    ],
)
def test_unavailable_sizes_are_rejected(
    counts: tuple[list[int], list[int]], keys: dict[str, Any], words: list[str]
) -> None:
    with refusing(ExperimentError, "data.partition.large_size:", "smaller", *words):
        deal(counts, ImbalancedScheme(clients=10, **keys))


def test_sizes_that_need_fractional_examples_are_rejected() -> None:
    counts = ([124, 80, 102, 80, 58, 102, 80, 124, 124, 102], [50] * 10)
    scheme = ImbalancedScheme(clients=20, large_clients=14, large_size=31, small_size=9, classes_per_client=2)
    assert "cannot be met" in refusal(counts, scheme, seed=3, validation=0.5)


# fixed


@pytest.mark.parametrize(
    ("counts", "clients", "train", "test", "validation", "keys"),
    [
        (MNIST, 10, 50, 950, 8, {}),
        (MNIST, 10, 200, 800, 33, {}),
        (FASHION_MNIST, 10, 50, 950, 8, {}),
        (FASHION_MNIST, 10, 200, 800, 33, {}),
        (FASHION_MNIST, 10, 900, 300, 150, {}),
        (MNIST, 10, 900, 300, 150, {"validation_from": "train"}),
        (CIFAR10, 20, 25, 475, 4, {}),
        (CIFAR10, 20, 100, 400, 17, {}),
        (CIFAR10, 20, 450, 150, 75, {"validation_from": "train"}),
    ],
)
def test_the_sizes_of_pfedbayes(
    counts: tuple[list[int], list[int]], clients: int, train: int, test: int, validation: int, keys: dict[str, Any]
) -> None:
    scheme = FixedScheme(clients=clients, train_per_class=train, test_per_class=test, labels_per_client=5, **keys)
    dealt = deal(counts, scheme)
    held = partition_classes(clients, 10, 5, 1)
    kept = train - validation if keys else train
    for split, size in (("train", kept), ("validation", validation), ("test", test)):
        expected = np.zeros((clients, 10), dtype=np.int64)
        np.put_along_axis(expected, held, size, axis=1)
        assert np.array_equal(classes_of(dealt, split, counts), expected)
    everything = np.concatenate([hand for hands in dealt.examples.values() for hand in hands])
    assert len(np.unique(everything)) == len(everything)
    assert np.array_equal(dealt.training_pool, np.sort(np.concatenate(dealt.examples["train"])))
    # The official sets are joined: some of each are in each split.
    first_test = sum(counts[0])
    for split in dealt.examples.values():
        dealt_out = np.concatenate(split)
        assert 0.05 < np.mean(dealt_out >= first_test) < 0.3


@given(
    n=st.integers(1, 12),
    classes=st.integers(1, 6),
    k=st.integers(1, 6),
    train=st.integers(1, 12),
    test=st.integers(1, 12),
    fraction=st.floats(0.01, 0.9),
    seed=SEEDS,
)
@settings(max_examples=80)
def test_fixed_counts_are_met_exactly_or_rejected(
    n: int, classes: int, k: int, train: int, test: int, fraction: float, seed: int
) -> None:
    k = min(k, classes)
    counts = ([60] * classes, [20] * classes)
    scheme = FixedScheme(clients=n, train_per_class=train, test_per_class=test, labels_per_client=k)
    validation = max(1, math.floor(train * fraction + 0.5))
    held = partition_classes(n, classes, k, seed)
    most = int(np.bincount(held.reshape(-1)).max())
    if most * (train + validation + test) > 80:
        assert "needs" in refusal(counts, scheme, seed=seed, validation=fraction)
        return
    dealt = deal(counts, scheme, seed, validation=fraction)
    for split, size in (("train", train), ("validation", validation), ("test", test)):
        expected = np.zeros((n, classes), dtype=np.int64)
        np.put_along_axis(expected, held, size, axis=1)
        assert np.array_equal(classes_of(dealt, split, counts), expected)


@pytest.mark.parametrize(
    ("counts", "clients", "train", "test", "words"),
    [
        # papers/003 needs more examples of MNIST's scarcest class than remain after validation.
        (
            MNIST, 10, 900, 300,
            ["6,750", "class 5", "6,313", "5 clients", 900, 150, 300, "validation_from: train"],
        ),
        (
            CIFAR10, 20, 450, 150,
            ["6,750", "6,000", "10 clients", "validation_from: train"],
        ),
        (CIFAR10, 20, 600, 150, ["8,500", "6,000"]),
    ],
)  # fmt: skip
def test_an_exhausted_class_is_named(
    counts: tuple[list[int], list[int]], clients: int, train: int, test: int, words: list[str]
) -> None:
    scheme = FixedScheme(clients=clients, train_per_class=train, test_per_class=test, labels_per_client=5)
    message = refusal(counts, scheme)
    assert tells(message, f"data.partition.train_per_class: {train}", *words)


def test_validation_leaves_training_examples() -> None:
    scheme = FixedScheme(clients=2, train_per_class=1, test_per_class=1, labels_per_client=1, validation_from="train")
    assert tells(refusal(CIFAR10, scheme), "train_per_class: 1", "1 for validation")


# settings


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (FixedScheme(clients=4, train_per_class=1, test_per_class=1, labels_per_client=11), ["labels_per_client: 11"]),
        (ImbalancedScheme(clients=4, classes_per_client=11), ["classes_per_client: 11"]),
        (ImbalancedScheme(clients=4, dominant_share=0.02), ["dominant_share: 0.02"]),
        (ClassesScheme(clients=4, classes_per_client=11), ["classes_per_client: 11", "10"]),
    ],
)
def test_a_scheme_that_does_not_fit_the_source_is_rejected(scheme: Scheme, words: list[str]) -> None:
    with refusing(ExperimentError, "data.partition." + words[0], *words) as error:
        PartitionSettings(scheme, 1, 0.1, 0.1).check(datasets.find_dataset("mnist"))
    assert error.value.exit_code == ExitCode.EXPERIMENT


CLASSES = {"scheme": "classes", "clients": 4, "classes_per_client": 2}
IMBALANCED = {"scheme": "imbalanced", "clients": 4}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (CLASSES | {"shares": [1.0]}, ["1 numbers", "2 classes"]),
        (CLASSES | {"shares": [0.5, 0.6]}, ["sum", "1.1"]),
        (CLASSES | {"shares": [1.5, -0.5]}, ["above 0"]),
        (CLASSES | {"classes_per_client": 3, "train_per_client": 2}, ["train_per_client: 2"]),
        (CLASSES | {"clients": 0}, ["greater than or equal to 1"]),
        ({"scheme": "dirichlet", "clients": 4, "alpha": 0}, ["greater than or equal to 0.001"]),
        ({"scheme": "iid", "clients": 4, "alpha": 1}, ["alpha", "not permitted"]),
        ({"scheme": "dominant", "clients": 4, "rho": 1.5}, ["less than or equal to 1"]),
        ({"scheme": "dominant", "clients": 4, "rho": float("nan")}, ["rho"]),
        (IMBALANCED | {"large_clients": 5}, ["large_clients: 5", "clients (4)"]),
        (IMBALANCED | {"large_size": 10}, ["small_size: 20", "large_size (10)"]),
        (
            IMBALANCED | {"dominant_share": 0.5, "classes_per_client": 2},
            ["dominant_share: 0.5", "classes_per_client 2"],
        ),
        (IMBALANCED | {"classes_per_client": 4, "small_size": 3}, ["small_size: 3", "classes_per_client (4)"]),
        (IMBALANCED | {"train_per_client": 3}, ["train_per_client", "not permitted"]),
        (
            {"scheme": "fixed", "clients": 4, "train_per_class": 0, "test_per_class": 1, "labels_per_client": 1},
            ["train_per"],
        ),
        ({"scheme": "natural", "test_fraction": 1.0}, ["test_fraction", "less than 1"]),
        ({"scheme": "natural", "min_examples": 2}, ["min_examples", "greater than or equal to 3"]),
        ({"scheme": "blocks"}, ["'classes', 'dirichlet', 'dominant', 'imbalanced', 'fixed', 'natural', 'i"]),
    ],
)
def test_contradictory_settings_are_rejected(keys: dict[str, Any], words: list[str]) -> None:
    with refusing(ValidationError, *words):
        TypeAdapter(Scheme).validate_python(keys)
