"""Properties of partitions that hold for every scheme, pool and seed."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from facts import refusing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.data import datasets
from fedloom.data import partition as partitioning
from fedloom.data.apportion import largest_remainders, partition_classes, quotas, stratified
from fedloom.data.assignment import Assignment, PartitionSettings, assign_examples
from fedloom.data.datasets import Pool, RawDataset
from fedloom.data.partition import measure_normalization
from fedloom.data.scheme_base import MixScheme
from fedloom.data.schemes import (
    ClassesScheme,
    DirichletScheme,
    DominantScheme,
    FixedScheme,
    IidScheme,
    ImbalancedScheme,
    Scheme,
    unseen_count,
)
from fedloom.data.spec import DataSpec, Normalization
from fedloom.errors import ExperimentError

SPLITS = ("train", "validation", "test")
SEEDS = st.integers(0, 2**63)


def labels(counts: list[int]) -> NDArray[np.int64]:
    """Return labels with these class counts, in a mixed order."""
    ordered = np.repeat(np.arange(len(counts)), counts)
    return ordered[shuffled(make_rng(0, "test"), len(ordered))]


def official(train: NDArray[np.int64], test: NDArray[np.int64]) -> RawDataset:
    """Return examples of which only the labels matter."""
    return RawDataset(*(Pool(np.zeros((len(pool), 1, 1, 1), dtype=np.uint8), pool) for pool in (train, test)))


def settings_of(scheme: Scheme, seed: int = 1, unseen: float = 0.25, validation: float = 1 / 6) -> PartitionSettings:
    return PartitionSettings(scheme, seed, unseen, validation)


def class_counts(deal: Assignment, split: str, whole: RawDataset, classes: int) -> NDArray[np.int64]:
    """Return the number of examples of each class that each client got, ``[n, C]``."""
    labels = np.concatenate([whole.train.labels, whole.test.labels])
    return np.stack([np.bincount(labels[hand], minlength=classes) for hand in deal.examples[split]])


@st.composite
def schemes(draw: st.DrawFn, classes: int) -> MixScheme:
    """Draw any of the six schemes that assign examples by class."""
    clients = draw(st.integers(1, 9))
    k = draw(st.integers(1, classes))
    share = draw(st.floats(1 / classes, 1))
    test_cap = draw(st.none() | st.integers(1, 6))
    caps = {"clients": clients, "train_per_client": draw(st.none() | st.integers(5, 20)), "test_per_client": test_cap}
    kind = draw(st.sampled_from(["classes", "dirichlet", "dominant", "imbalanced", "fixed", "iid"]))
    if kind == "classes":
        weights = draw(st.none() | st.lists(st.integers(1, 5), min_size=k, max_size=k))
        shares = None if weights is None else tuple(w / sum(weights) for w in weights)
        return ClassesScheme(**caps, classes_per_client=k, shares=shares)
    if kind == "dirichlet":
        alphas = st.floats(0.01, 10)
        return DirichletScheme(**caps, alpha=draw(alphas), alpha_unseen=draw(st.none() | alphas))
    if kind == "dominant":
        return DominantScheme(**caps, rho=share)
    if kind == "imbalanced":
        mix = draw(st.sampled_from([{}, {"dominant_share": share}, {"classes_per_client": k}]))
        return ImbalancedScheme(
            clients=clients,
            large_clients=draw(st.integers(1, clients)),
            large_size=draw(st.integers(6, 60)),
            small_size=draw(st.integers(5, 6)),
            test_per_client=test_cap,
            **mix,
        )
    if kind == "fixed":
        return FixedScheme(
            clients=clients,
            train_per_class=draw(st.integers(2, 8)),
            test_per_class=draw(st.integers(1, 6)),
            labels_per_client=k,
            validation_from=draw(st.sampled_from(["rest", "train"])),
        )
    return IidScheme(**caps)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], PartitionSettings]:
    classes = draw(st.integers(1, 5))
    train = draw(st.lists(st.integers(30, 90), min_size=classes, max_size=classes))
    test = draw(st.lists(st.integers(5, 25), min_size=classes, max_size=classes))
    scheme = draw(schemes(classes))
    return train, test, PartitionSettings(scheme, draw(SEEDS), draw(st.floats(0, 0.9)), draw(st.floats(0.1, 0.5)))


def dealt(train: list[int], test: list[int], how: PartitionSettings) -> Assignment | None:
    """Return the assignment, or None if the scheme cannot be satisfied."""
    try:
        return assign_examples(official(labels(train), labels(test)), len(train), how)
    except ExperimentError:
        return None


@pytest.mark.slow
@given(problems())
@example(
    ([30, 30, 68, 74, 83], [5] * 5, PartitionSettings(DominantScheme(clients=1, rho=1.0), 0, 0.0, 0.1))
)  # 28.5 of 285
@example(([30] * 3, [5] * 3, PartitionSettings(DominantScheme(clients=1, rho=1.0), 0, 0.0, 0.35)))  # 31.5 of 90
@settings(max_examples=100)
def test_no_example_is_assigned_twice_and_each_comes_from_its_pool(
    problem: tuple[list[int], list[int], PartitionSettings],
) -> None:
    train, test, how = problem
    deal = dealt(train, test, how)
    if deal is None:
        return
    everything = np.concatenate([hand for split in SPLITS for hand in deal.examples[split]])
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < sum(train) + sum(test)
    assert np.isin(np.concatenate(deal.examples["train"]), deal.training_pool).all()
    for split in ("validation", "test"):
        assert not np.isin(np.concatenate(deal.examples[split]), deal.training_pool).any()
    if not isinstance(how.scheme, FixedScheme):
        assert np.concatenate(deal.examples["validation"]).max() < sum(train)
        assert np.concatenate(deal.examples["test"]).min() >= sum(train)
        assert len(deal.training_pool) == sum(train) - round(round(sum(train) * how.validation_fraction, 9))
    n = how.scheme.clients
    for split in SPLITS:
        assert len(deal.examples[split]) == n
        assert all(len(hand) > 0 and np.all(np.diff(hand) > 0) for hand in deal.examples[split])
    assert deal.seen.sum() == n - unseen_count(n, how.held_out_fraction)
    assert deal.owners == (None,) * n


@pytest.mark.slow
@given(problems())
@settings(max_examples=100)
def test_all_splits_of_a_client_have_its_mix_to_within_one_example(
    problem: tuple[list[int], list[int], PartitionSettings],
) -> None:
    train, test, how = problem
    whole = official(labels(train), labels(test))
    deal = dealt(train, test, how)
    if deal is None or isinstance(how.scheme, FixedScheme):  # counts are fixed: tests/unit/test_schemes.py
        return
    available = np.bincount(whole.train.labels[deal.training_pool], minlength=len(train))
    mixes = how.scheme.mixes(available, deal.seen, how.seed)
    assert np.allclose(mixes.sum(1), 1)
    of_pool = {"train": available, "validation": np.array(train) - available, "test": np.array(test)}
    for split in SPLITS:
        counts = class_counts(deal, split, whole, len(train))
        size = how.scheme.sizes(split, mixes, of_pool[split], deal.seen, how.seed)
        exact = mixes * size[:, None]
        assert np.all(counts >= np.floor(exact - 1e-6))
        assert np.all(counts <= np.ceil(exact + 1e-6))
        assert np.all(size - counts.sum(1) < len(train))
        cap = how.scheme.cap(split)
        if cap is not None:
            assert counts.sum(1).max() <= cap


@given(problems())
@settings(max_examples=60)
def test_equal_settings_give_equal_partitions(problem: tuple[list[int], list[int], PartitionSettings]) -> None:
    train, test, how = problem

    def outcome() -> list[list[int]] | str:
        try:
            deal = assign_examples(official(labels(train), labels(test)), len(train), how)
        except ExperimentError as error:
            return str(error)
        return [deal.seen.tolist(), *(hand.tolist() for split in SPLITS for hand in deal.examples[split])]

    assert outcome() == outcome()


@given(n=st.integers(1, 40), classes=st.integers(1, 12), k=st.integers(1, 12), seed=SEEDS)
@settings(max_examples=200)
def test_classes_are_assigned_distinct_and_evenly_for_every_seed(n: int, classes: int, k: int, seed: int) -> None:
    k = min(k, classes)
    held = partition_classes(n, classes, k, seed)
    assert held.shape == (n, k)
    assert all(len(set(row)) == k for row in held.tolist())
    times = np.bincount(held.reshape(-1), minlength=classes)
    assert times.sum() == n * k
    assert times.max() - times.min() <= 1


@given(n=st.integers(1, 30), classes=st.integers(1, 8), k=st.integers(1, 8), seed=SEEDS)
@settings(max_examples=100)
def test_partition_classes_succeeds_if_each_slot_has_an_example(n: int, classes: int, k: int, seed: int) -> None:
    k = min(k, classes)
    # Two examples for each of a class's ⌈nk/C⌉ slots are enough in every split.
    places = -(-n * k // classes)
    how = settings_of(ClassesScheme(clients=n, classes_per_client=k), seed, validation=0.5)
    whole = official(labels([4 * places] * classes), labels([2 * places] * classes))
    counts = class_counts(assign_examples(whole, classes, how), "train", whole, classes)
    assert np.all((counts > 0).sum(1) == k)


def test_the_protocol_of_the_papers_gives_every_client_500_100_100() -> None:
    how = settings_of(ClassesScheme(clients=100, classes_per_client=2), unseen=0.1)
    whole = official(labels([6000] * 10), labels([1000] * 10))
    deal = assign_examples(whole, 10, how)
    for split, size in (("train", 500), ("validation", 100), ("test", 100)):
        counts = class_counts(deal, split, whole, 10)
        assert np.all(np.sort(counts, axis=1)[:, -2:] == size // 2)
        assert np.all(counts.sum(1) == size)
    assert deal.seen.sum() == 90


def test_three_of_ten_classes_for_a_hundred_clients_use_every_example() -> None:
    how = settings_of(ClassesScheme(clients=100, classes_per_client=3))
    deal = assign_examples(official(labels([600] * 10), labels([100] * 10)), 10, how)
    assert [len(hand) for hand in deal.examples["train"]] == [50] * 100
    assert [len(hand) for hand in deal.examples["test"]] == [10] * 100


def test_class_pairs_are_as_frequent_as_by_chance() -> None:
    pairs = Counter[tuple[int, ...]]()
    seeds, n = 40, 100
    for seed in range(seeds):
        pairs.update(tuple(sorted(row)) for row in partition_classes(n, 10, 2, seed).tolist())
    expected = seeds * n / 45
    assert set(pairs) == set(combinations(range(10), 2))
    assert all(abs(count - expected) < 5 * expected**0.5 for count in pairs.values())


def test_blocks_of_clients_do_not_cover_the_classes() -> None:
    covered = sum(len(set(partition_classes(100, 10, 2, seed)[:5].reshape(-1).tolist())) == 10 for seed in range(100))
    assert covered < 10  # the official code: always


def test_unseen_clients_are_drawn_at_random() -> None:
    whole = official(labels([60] * 5), labels([30] * 5))
    drawn = {
        tuple(np.flatnonzero(~assign_examples(whole, 5, settings_of(IidScheme(clients=10), seed, 0.2)).seen).tolist())
        for seed in range(30)
    }
    assert len(drawn) > 10
    assert all(len(ids) == 2 for ids in drawn)


def test_a_new_seed_changes_the_assignment() -> None:
    whole = official(labels([120] * 5), labels([60] * 5))
    for scheme in (
        ClassesScheme(clients=20, classes_per_client=2),
        DirichletScheme(clients=20, alpha=0.5),
        DominantScheme(clients=20, rho=0.5),
        ImbalancedScheme(clients=20, large_size=100, small_size=5),
        FixedScheme(clients=20, train_per_class=10, test_per_class=5, labels_per_client=2),
        IidScheme(clients=20),
    ):
        one, two = (assign_examples(whole, 5, settings_of(scheme, seed)) for seed in (1, 2))
        assert not np.array_equal(one.seen, two.seen)
        assert not np.array_equal(one.training_pool, two.training_pool)
        for split in SPLITS:
            same = sum(np.array_equal(a, b) for a, b in zip(one.examples[split], two.examples[split], strict=True))
            assert same == 0


def test_alpha_of_unseen_clients_does_not_change_seen_mixes() -> None:
    seen = np.arange(50) % 2 == 0
    base = DirichletScheme(clients=50, alpha=0.1)
    other = DirichletScheme(clients=50, alpha=0.1, alpha_unseen=100.0)
    available = np.full(10, 100)
    one, two = base.mixes(available, seen, 3), other.mixes(available, seen, 3)
    assert np.array_equal(one[seen], two[seen])
    assert one[~seen].max(1).mean() > 0.5
    assert two[~seen].max(1).mean() < 0.2


def test_dirichlet_mixes_have_the_moments_of_the_distribution() -> None:
    mixes = DirichletScheme(clients=4000, alpha=0.1).mixes(np.full(10, 1), np.ones(4000, dtype=np.bool_), 1)
    assert np.allclose(mixes.sum(1), 1)
    assert mixes.mean(0) == pytest.approx(np.full(10, 0.1), abs=0.02)
    assert mixes.var(0) == pytest.approx(np.full(10, 0.1 * 0.9 / (10 * 0.1 + 1)), rel=0.15)


def test_dirichlet_clients_have_equal_sizes_and_use_up_the_scarcest_class() -> None:
    whole = official(labels([600] * 10), labels([100] * 10))
    counts = class_counts(
        assign_examples(whole, 10, settings_of(DirichletScheme(clients=40, alpha=0.1))), "train", whole, 10
    )
    assert len(set(counts.sum(1).tolist())) == 1
    assert counts.sum(0).max() > 500 - 40


def test_shares_follow_the_order_of_the_drawn_classes() -> None:
    scheme = ClassesScheme(clients=20, classes_per_client=3, shares=(0.7, 0.2, 0.1), train_per_client=10)
    whole = official(labels([300] * 6), labels([120] * 6))
    counts = class_counts(assign_examples(whole, 6, settings_of(scheme)), "train", whole, 6)
    assert np.all(np.sort(counts, axis=1)[:, -3:] == [1, 2, 7])
    held = partition_classes(20, 6, 3, 1)
    assert np.array_equal(counts.argmax(1), held[:, 0])


def test_size_limits_preserve_the_mix() -> None:
    whole = official(labels([600] * 10), labels([100] * 10))
    scheme = ClassesScheme(clients=10, classes_per_client=4, train_per_client=20, test_per_client=8)
    deal = assign_examples(whole, 10, settings_of(scheme))
    assert np.all(np.sort(class_counts(deal, "train", whole, 10), axis=1)[:, -4:] == 5)
    assert np.all(np.sort(class_counts(deal, "test", whole, 10), axis=1)[:, -4:] == 2)
    assert min(len(hand) for hand in deal.examples["validation"]) > 80


def test_quotas_are_exchanged_until_every_client_has_its_size() -> None:
    # All remainders are equal between clients: without exchanges the last clients get too few.
    available = np.array([37, 9, 25, 3, 26])
    mixes = np.tile(available / 100, (10, 1))
    counts = quotas(mixes, np.full(10, 9), available, 1, "train")
    assert counts.sum(1).tolist() == [9] * 10
    assert np.all(counts.sum(0) <= available)


@pytest.mark.parametrize(
    ("n", "fraction", "count"), [(100, 0.1, 10), (10, 0.0, 0), (5, 0.1, 1), (1, 0.9, 0), (4, 0.99, 3)]
)
def test_unseen_count(n: int, fraction: float, count: int) -> None:
    assert unseen_count(n, fraction) == count


def test_largest_remainders_preserve_the_sum() -> None:
    assert largest_remainders(np.array([1.5, 2.25, 3.25])).tolist() == [2, 2, 3]
    assert largest_remainders(np.array([1000.0, 999.9999999999])).tolist() == [1000, 1000]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.floats(0, 1), SEEDS)
@settings(max_examples=100)
def test_a_stratified_draw_has_its_size_and_class_proportions(counts: list[int], part: float, seed: int) -> None:
    of = labels(counts)
    size = round(part * len(of))
    drawn = stratified(of, size, make_rng(seed, "test"))
    assert drawn.shape == of.shape
    assert drawn.sum() == size
    exact = np.array(counts) * size / max(len(of), 1)
    found = np.bincount(of[drawn], minlength=len(counts))
    assert np.all(found >= np.floor(exact - 1e-6))
    assert np.all(found <= np.ceil(exact + 1e-6))


def test_a_stratified_draw_selects_examples_of_a_class_uniformly() -> None:
    of = labels([8, 4])
    times = sum(stratified(of, 3, make_rng(seed, "test")).astype(int) for seed in range(800))
    assert np.all(abs(times - 200) < 5 * 200**0.5)


def both(train: NDArray[np.generic], test: NDArray[np.generic]) -> RawDataset:
    """Return examples of which only the inputs matter."""
    return RawDataset(*(Pool(inputs, np.zeros(len(inputs), dtype=np.int64)) for inputs in (train, test)))


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 3), st.integers(1, 40))
@settings(max_examples=30)
def test_normalization_of_pixels_equals_numpys(seed: int, count: int, channels: int, chunk: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (count, channels, 3, 3), dtype=np.uint8)
    pool = np.arange(0, count, 2)
    with mock.patch.object(partitioning, "CHUNK", chunk):
        found = measure_normalization(
            both(images[: count // 2], images[count // 2 :]), DataSpec.single("pixels", (channels, 3, 3)), pool
        )
    scaled = images[pool].astype(np.float64) / 255
    assert found.mean == pytest.approx(scaled.mean((0, 2, 3)))
    assert found.std == pytest.approx(scaled.std((0, 2, 3)))


@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.integers(1, 5))
@settings(max_examples=30)
def test_normalization_of_features_equals_numpys_in_any_order(seed: int, count: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    features = (rng.normal(3, 2, (count, width)) * 10.0 ** rng.integers(-3, 4, width)).astype(np.float32)
    everything = np.arange(count)
    found = measure_normalization(both(features[:1], features[1:]), DataSpec.single("features", (width,)), everything)
    assert found.mean == pytest.approx(features.astype(np.float64).mean(0))
    assert found.std == pytest.approx(features.astype(np.float64).std(0))
    again = rng.permutation(features)
    assert measure_normalization(both(again, again[:0]), DataSpec.single("features", (width,)), everything) == found


def test_a_constant_channel_or_feature_is_not_divided_by_zero() -> None:
    pixels = np.full((4, 1, 2, 2), 7, dtype=np.uint8)
    features = np.full((4, 2), 0.1, dtype=np.float32)
    for x, spec in ((pixels, DataSpec.single("pixels", (1, 2, 2))), (features, DataSpec.single("features", (2,)))):
        assert set(measure_normalization(both(x, x), spec, np.arange(4)).std) == {1.0}


def test_tokens_are_not_normalized() -> None:
    tokens = np.zeros((4, 5), dtype=np.uint8)
    assert measure_normalization(both(tokens, tokens), DataSpec.single("tokens", (5,)), np.arange(4)) == Normalization(
        (), ()
    )


GOLDEN = {
    "classes": "fd99806dce5b9cdd",
    "dirichlet": "e368ccffa9cc2e71",
    "dominant": "d83a15b748da2fc5",
    "imbalanced": "8d96aa127a0c633b",
    "fixed": "b2123b41bfb44718",
    "iid": "47d266eb3199cf20",
}


@pytest.mark.parametrize(
    "scheme",
    [
        ClassesScheme(clients=12, classes_per_client=3, shares=(0.5, 0.3, 0.2)),
        DirichletScheme(clients=12, alpha=0.3, alpha_unseen=1.0),
        DominantScheme(clients=12, rho=0.4),
        ImbalancedScheme(clients=12, large_size=100, small_size=8, dominant_share=0.5),
        FixedScheme(clients=12, train_per_class=9, test_per_class=7, labels_per_client=2),
        IidScheme(clients=12, train_per_client=11),
    ],
    ids=lambda scheme: scheme.scheme,
)
def test_the_partition_of_a_seed_never_changes(scheme: Scheme) -> None:
    """If this fails on purpose, raise ``partition.ASSIGNMENT``: cached partitions differ from new ones."""
    whole = official(labels([120, 90, 100, 110]), labels([40, 30, 35, 45]))
    deal = assign_examples(whole, 4, settings_of(scheme, seed=7))
    digest = hashlib.sha256(np.packbits(deal.seen).tobytes())
    for split in SPLITS:
        for hand in deal.examples[split]:
            if split == "test" and scheme.scheme != "fixed":
                hand = hand - len(whole.train)  # as positions were counted when the first of these were recorded
            digest.update(np.int64(len(hand)).tobytes() + hand.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[scheme.scheme]


def test_a_keyed_generator_is_the_same_on_every_machine() -> None:
    assert shuffled(make_rng(1, "a", 2), 8).tolist() == shuffled(make_rng(1, "a", 2), 8).tolist()
    draws = {tuple(make_rng(*key).random(4)) for key in [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (11, "a")]}
    assert len(draws) == 5


@pytest.mark.parametrize(
    ("train", "test", "scheme", "words"),
    [
        (
            [6, 6],
            [9, 9],
            IidScheme(clients=20),
            ["data.partition.clients: 20", "without a train example", "fewer clients"],
        ),
        (
            [60, 60],
            [90, 90],
            IidScheme(clients=30),
            ["data.partition.clients: 30", "without a validation example", "validation_fraction"],
        ),
        ([600, 600], [3, 3], IidScheme(clients=20), ["without a test example", "the test pool has 6"]),
        (
            [90, 90],
            [90, 90],
            ClassesScheme(clients=2, classes_per_client=2, shares=(0.999, 0.001)),
            ["classes_per_client: 2", "less unequal shares"],
        ),
    ],
)
def test_clients_without_examples_are_rejected(
    train: list[int], test: list[int], scheme: Scheme, words: list[str]
) -> None:
    with refusing(ExperimentError, *words):
        assign_examples(official(labels(train), labels(test)), 2, settings_of(scheme))


def test_an_unknown_source_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ExperimentError) as error:
        datasets.find_dataset("imagenet")
    assert (error.value.key, error.value.found) == ("data.dataset", "imagenet")
    assert error.value.allowed == list(datasets.DATASETS)
