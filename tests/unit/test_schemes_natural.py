"""``natural``: every client has exactly the examples of one owner, split without leaks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedloom.data.assignment import Assignment, PartitionSettings, assign_examples
from fedloom.data.datasets import Owners, Pool, RawDataset
from fedloom.data.schemes import IidScheme, NaturalScheme
from fedloom.errors import ExperimentError

SPLITS = ("train", "validation", "test")
CLASSES = 4


def pool(owners: list[int], seed: int) -> Pool:
    """Return examples of these owners, with random labels."""
    labels = np.random.default_rng(seed).integers(0, CLASSES, len(owners))
    return Pool(np.zeros((len(owners), 1), dtype=np.float32), labels, np.array(owners, dtype=np.int64))


def official(train: list[int], test: list[int], names: int, *, divided: bool, overlap: int = 0) -> RawDataset:
    """Return examples with given owners."""
    owners = Owners(tuple(f"writer-{i}" for i in range(names)), divided, overlap)
    return RawDataset(pool(train, 1), pool(test, 2), owners)


def deal(
    whole: RawDataset, scheme: NaturalScheme, seed: int = 1, unseen: float = 0.25, validation: float = 0.2
) -> Assignment:
    return assign_examples(whole, CLASSES, PartitionSettings(scheme, seed, unseen, validation))


def mixed(counts: list[int]) -> list[int]:
    """Return owners, with so many examples of each, in a mixed order."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).tolist()


@st.composite
def problems(draw: st.DrawFn) -> tuple[RawDataset, NaturalScheme, PartitionSettings]:
    names = draw(st.integers(1, 8))
    train = mixed(draw(st.lists(st.integers(0, 60), min_size=names, max_size=names)))
    test = mixed(draw(st.lists(st.integers(0, 30), min_size=names, max_size=names)))
    whole = official(train, test, names, divided=draw(st.booleans()), overlap=draw(st.sampled_from([0, 0, 1, 7])))
    scheme = NaturalScheme(
        clients=draw(st.none() | st.integers(1, names)),
        min_examples=draw(st.integers(3, 40)),
        test_fraction=draw(st.none() | st.floats(0.05, 0.9)),
        train_per_client=draw(st.none() | st.integers(1, 20)),
        test_per_client=draw(st.none() | st.integers(1, 10)),
    )
    return (
        whole,
        scheme,
        PartitionSettings(scheme, draw(st.integers(0, 2**63)), draw(st.floats(0, 0.9)), draw(st.floats(0.05, 0.6))),
    )


@given(problems())
@settings(max_examples=100)
def test_every_client_has_only_examples_of_its_owner(
    problem: tuple[RawDataset, NaturalScheme, PartitionSettings],
) -> None:
    whole, scheme, how = problem
    assert whole.train.owners is not None
    assert whole.test.owners is not None
    try:
        dealt = assign_examples(whole, CLASSES, how)
    except ExperimentError:
        return
    n = len(dealt.seen)
    assert scheme.clients in (None, n)
    assert len(set(dealt.owners)) == n
    order = [whole.owners.names.index(str(owner)) for owner in dealt.owners]
    assert order == sorted(order)
    whose = np.concatenate([whole.train.owners, whole.test.owners])
    everything = np.concatenate([hand for split in SPLITS for hand in dealt.examples[split]])
    assert len(np.unique(everything)) == len(everything)
    for i, owner in enumerate(order):
        for split in SPLITS:
            hand = dealt.examples[split][i]
            assert len(hand) > 0
            assert np.all(np.diff(hand) > 0)
            assert np.all(whose[hand] == owner)
        train, validation, test = (dealt.examples[split][i] for split in SPLITS)
        assert len(train) <= (scheme.train_per_client or len(train))
        assert len(test) <= (scheme.test_per_client or len(test))
        assert np.isin(train, dealt.training_pool).all()
        official_division = scheme.test_fraction is None and whole.owners.divided
        if official_division:
            assert train.max() < len(whole.train)
            assert test.min() >= len(whole.train)
        if whole.owners.overlap:
            # Positions among the owner's examples, which are in time order.
            mine = np.flatnonzero(whose == owner)
            last, *held = (np.searchsorted(mine, part) for part in (train, validation, test))
            assert held[0].min() - last.max() > whole.owners.overlap
            if not official_division:
                assert held[1].min() - held[0].max() > whole.owners.overlap
    assert not np.isin(np.concatenate(dealt.examples["validation"] + dealt.examples["test"]), dealt.training_pool).any()


@given(problems())
@settings(max_examples=60)
def test_equal_settings_give_equal_partitions(problem: tuple[RawDataset, NaturalScheme, PartitionSettings]) -> None:
    whole, _, how = problem

    def outcome() -> list[Any] | str:
        try:
            dealt = assign_examples(whole, CLASSES, how)
        except ExperimentError as error:
            return str(error)
        return [dealt.owners, dealt.seen.tolist(), *(h.tolist() for split in SPLITS for h in dealt.examples[split])]

    assert outcome() == outcome()


def test_an_owner_without_a_test_set_is_split_by_class() -> None:
    counts = [100, 60]
    whole = official(mixed(counts), [], 2, divided=False)
    dealt = deal(whole, NaturalScheme(), validation=0.25)
    assert [[len(hand) for hand in dealt.examples[split]] for split in SPLITS] == [[60, 36], [20, 12], [20, 12]]
    for client in range(2):
        of = {split: np.bincount(whole.train.labels[dealt.examples[split][client]], minlength=4) for split in SPLITS}
        every = sum(of.values())
        for split, share in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
            assert np.all(abs(of[split] - share * every) < 2)


def test_different_train_and_test_writers_are_joined() -> None:
    # As in QMNIST: no writer is in both official sets.
    whole = official(mixed([50, 50]), (np.array(mixed([50, 50, 50])) + 2).tolist(), 5, divided=False)
    dealt = deal(whole, NaturalScheme(), unseen=0.4)
    assert dealt.owners == tuple(f"writer-{i}" for i in range(5))
    assert [len(hand) for hand in dealt.examples["test"]] == [10] * 5
    assert [len(hand) for hand in dealt.examples["validation"]] == [8] * 5
    assert dealt.seen.sum() == 3


def test_the_official_split_is_kept_unless_another_is_requested() -> None:
    whole = official(mixed([40] * 3), mixed([40] * 3), 3, divided=True)
    sizes = {
        fraction: len(deal(whole, NaturalScheme(test_fraction=fraction)).examples["test"][0])
        for fraction in (None, 0.1)
    }
    assert sizes == {None: 40, 0.1: 8}


def windows(text: NDArray[np.uint8], length: int, parts: list[int]) -> RawDataset:
    """Return windows of a text and the next characters; owners have consecutive parts of the text, 80 % of it train."""
    views = sliding_window_view(text, length)
    places: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    whose: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    start = 0
    for owner, size in enumerate(parts):
        first, last = np.arange(start, start + size - length), start + size * 4 // 5
        for name, chosen in (("train", first[first + length < last]), ("test", first[first >= last])):
            places[name].append(chosen)
            whose[name].append(np.full(len(chosen), owner))
        start += size
    pools = []
    for name in ("train", "test"):
        at = np.concatenate(places[name])
        pools.append(Pool(views[at], text[at + length].astype(np.int64), np.concatenate(whose[name])))
    return RawDataset(*pools, Owners(tuple(f"role-{i}" for i in range(len(parts))), divided=True, overlap=length))


@pytest.mark.parametrize("test_fraction", [None, 0.3])
def test_held_out_text_shares_no_character_with_training_text(test_fraction: float | None) -> None:
    length = 8
    text = np.arange(250, dtype=np.uint8)  # each character is its own position
    whole = windows(text, length, [140, 110])
    dealt = assign_examples(whole, 256, PartitionSettings(NaturalScheme(test_fraction=test_fraction), 1, 0.0, 0.2))
    inputs = np.concatenate([whole.train.inputs, whole.test.inputs])
    labels = np.concatenate([whole.train.labels, whole.test.labels])
    for client in range(2):
        seen = [
            {
                *np.unique(inputs[dealt.examples[split][client]]).tolist(),
                *labels[dealt.examples[split][client]].tolist(),
            }
            for split in SPLITS
        ]
        assert all(seen)
        train, validation, test = seen
        assert max(train) < min(validation)
        assert max(validation) < min(test)


def test_the_gap_is_as_narrow_as_possible() -> None:
    whole = official([0] * 100, [], 1, divided=False, overlap=5)
    dealt = deal(whole, NaturalScheme(test_fraction=0.2), unseen=0.0, validation=0.2)
    train, validation, test = (dealt.examples[split][0] for split in SPLITS)
    assert test.tolist() == list(range(80, 100))
    assert validation.tolist() == list(range(60, 75))
    assert train.tolist() == list(range(55))


def test_a_limit_on_text_takes_evenly_spaced_windows() -> None:
    whole = official([0] * 100, [0] * 30, 1, divided=True, overlap=5)
    dealt = deal(whole, NaturalScheme(train_per_client=15, test_per_client=10), unseen=0.0)
    train, test = dealt.examples["train"][0], dealt.examples["test"][0]
    assert train.tolist() == list(range(0, 75, 5))
    assert test.tolist() == list(range(100, 130, 3))
    assert len(dealt.examples["validation"][0]) == 20
    assert len(dealt.training_pool) == 75


def test_a_limit_on_exchangeable_examples_preserves_the_mix() -> None:
    whole = official([0] * 400, [0] * 100, 1, divided=True)
    free = deal(whole, NaturalScheme(), unseen=0.0).examples["train"][0]
    capped = deal(whole, NaturalScheme(train_per_client=40), unseen=0.0).examples["train"][0]
    assert len(capped) == 40
    assert np.isin(capped, free).all()
    of = [np.bincount(whole.train.labels[hand], minlength=CLASSES) for hand in (capped, free)]
    assert np.all(abs(of[0] - of[1] * 40 / len(free)) < 1)


def test_examples_of_a_client_do_not_depend_on_the_others() -> None:
    whole = official(mixed([30] * 12), mixed([10] * 12), 12, divided=True)
    every, some = deal(whole, NaturalScheme()), deal(whole, NaturalScheme(clients=5))
    assert len(set(every.owners)) == 12
    for i, owner in enumerate(some.owners):
        j = every.owners.index(owner)
        for split in SPLITS:
            assert np.array_equal(some.examples[split][i], every.examples[split][j])


def test_client_owners_are_drawn_at_random() -> None:
    whole = official(mixed([30] * 12), mixed([10] * 12), 12, divided=True)
    drawn = {deal(whole, NaturalScheme(clients=5), seed).owners for seed in range(20)}
    assert len(drawn) > 15


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (
            NaturalScheme(clients=4, min_examples=20),
            ["data.partition.clients: at 4, 2 of 5 owners qualify", "2 have fewer than 20 examples",
             "1 more would have no", "at most 2"],
        ),
        (
            NaturalScheme(min_examples=200),
            ["data.partition.min_examples: at 200, 0 of 5 owners qualify", "5 have fewer than 200",
             "a smaller min_examples"],
        ),
    ],
)  # fmt: skip
def test_ineligible_owners_are_counted(scheme: NaturalScheme, words: list[str]) -> None:
    # The fourth has no test example; the last has no examples.
    whole = official(mixed([30, 30, 5, 30, 0]), mixed([10, 10, 5, 0, 0]), 5, divided=True)
    with pytest.raises(ExperimentError) as error:
        deal(whole, scheme)
    for word in words:
        assert word in str(error.value)


def test_text_too_short_for_the_gap_is_ineligible() -> None:
    whole = official([0] * 100 + [1] * 20, [0] * 20 + [1] * 20, 2, divided=True, overlap=30)
    assert deal(whole, NaturalScheme(), unseen=0.0).owners == ("writer-0",)
    with pytest.raises(ExperimentError, match=r"1 of 2 owners .*\b0 .*\b1 "):
        deal(whole, NaturalScheme(clients=2))


def test_data_without_owners_are_rejected() -> None:
    bare = Pool(np.zeros((20, 1), dtype=np.float32), np.arange(20) % CLASSES)
    how = PartitionSettings(NaturalScheme(), 1, 0.1, 0.1)
    with pytest.raises(ExperimentError, match=r"data\.partition\.scheme: natural .* bare .* classes,"):
        assign_examples(RawDataset(bare, bare), CLASSES, how, "bare")


def test_other_schemes_ignore_the_owners() -> None:
    whole = official(mixed([40] * 3), mixed([40] * 3), 3, divided=True)
    bare = RawDataset(Pool(whole.train.inputs, whole.train.labels), Pool(whole.test.inputs, whole.test.labels))
    one, two = (
        assign_examples(of, CLASSES, PartitionSettings(IidScheme(clients=4), 1, 0.25, 0.2)) for of in (whole, bare)
    )
    assert one.owners == (None,) * 4
    for split in SPLITS:
        assert all(np.array_equal(a, b) for a, b in zip(one.examples[split], two.examples[split], strict=True))


@pytest.mark.parametrize(("overlap", "golden"), [(0, "24699140f2ebaa7a"), (3, "6d056e2dfcec0eb6")])
def test_the_partition_of_a_seed_never_changes(overlap: int, golden: str) -> None:
    """If this fails on purpose, raise ``partition.ASSIGNMENT``: cached partitions differ from new ones."""
    owners = np.arange(300) * 7 % 300 % 9
    labels = np.arange(300) * 11 % 300 % CLASSES
    part = [
        Pool(np.zeros((len(y), 1), dtype=np.float32), y, w)
        for y, w in zip((labels[:240], labels[240:]), (owners[:240], owners[240:]), strict=True)
    ]
    whole = RawDataset(*part, Owners(tuple("abcdefghi"), divided=False, overlap=overlap))
    dealt = deal(whole, NaturalScheme(clients=6, train_per_client=15), seed=7)
    digest = hashlib.sha256("".join(map(str, dealt.owners)).encode() + np.packbits(dealt.seen).tobytes())
    for split in SPLITS:
        for hand in dealt.examples[split]:
            digest.update(np.int64(len(hand)).tobytes() + hand.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == golden
