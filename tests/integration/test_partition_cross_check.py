"""The schemes Dirichlet and classes compared statistically with ``flwr-datasets``, an independent implementation.

The protocols differ. For every class, Flower draws its distribution over the n clients from Dir(α) and uses all data;
FedLoom draws, for every client, its mix of C classes from Dir(α), with clients of equal size. With both written as
normalized Gamma(α) variables g_ic, Flower's has π_ic ∝ g_ic
Σ_j g_jc, and Σ_j g_jc → nα for many clients: the class
mix of a client then is Dir(α) over the classes in both. So mixes are compared, and sizes are not.

Needs ``flwr-datasets``, which is not a dependency of FedLoom: half a gigabyte with its requirements.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedloom.data.assignment import PartitionSettings, assign_examples
from fedloom.data.datasets import Pool, RawDataset
from fedloom.data.scheme_base import MixScheme
from fedloom.data.schemes import ClassesScheme, DirichletScheme

partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")

CLASSES = 10
LABELS = np.tile(np.arange(CLASSES), 3000)


def theirs(partitioner: Any) -> NDArray[np.int64]:
    """Return the number of examples of each class that each client gets from Flower, ``[n, C]``."""
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"label": LABELS.tolist()}).with_format("numpy")
    hands = [partitioner.load_partition(i)["label"][:] for i in range(partitioner.num_partitions)]
    return np.stack([np.bincount(hand, minlength=CLASSES) for hand in hands])


def ours(scheme: MixScheme, seed: int = 1) -> NDArray[np.int64]:
    """Return the number of training examples of each class that each client gets from FedLoom, ``[n, C]``."""
    pool = Pool(np.zeros((len(LABELS), 1, 1, 1), dtype=np.uint8), LABELS)
    dealt = assign_examples(RawDataset(pool, pool), CLASSES, PartitionSettings(scheme, seed, 0.0, 0.01))
    return np.stack([np.bincount(LABELS[hand], minlength=CLASSES) for hand in dealt.examples["train"]])


def concentration(counts: NDArray[np.int64]) -> tuple[float, float]:
    """Return the means over clients of the largest class share, and of the mix's entropy as a fraction of log C."""
    mixes = counts[counts.sum(1) > 0] / counts[counts.sum(1) > 0].sum(1, keepdims=True)
    entropy = -(mixes * np.log(np.where(mixes > 0, mixes, 1))).sum(1) / np.log(CLASSES)
    return float(mixes.max(1).mean()), float(entropy.mean())


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_dirichlet_mixes_are_as_concentrated_as_flowers(alpha: float) -> None:
    # The standard error of a difference of two means over 200 clients is about 0.016 at α = 0.3, and less at 1. Twice
    # or half of α moves both measures by 0.06 or more.
    n, tolerance = 200, 0.045
    flower = concentration(
        theirs(
            partitioners.DirichletPartitioner(
                num_partitions=n,
                partition_by="label",
                alpha=alpha,
                min_partition_size=0,
                self_balancing=False,
                shuffle=False,
                seed=1,
            )
        )
    )
    same, half, double = (
        concentration(ours(DirichletScheme(clients=n, alpha=a))) for a in (alpha, alpha / 2, alpha * 2)
    )
    for measure in range(2):
        assert abs(same[measure] - flower[measure]) < tolerance
        assert abs(half[measure] - flower[measure]) > tolerance
        assert abs(double[measure] - flower[measure]) > tolerance


def pairs(counts: NDArray[np.int64]) -> int:
    """Return the number of different pairs of classes that occur together in a client."""
    return len({pair for row in counts for pair in combinations(np.flatnonzero(row).tolist(), 2)})


@pytest.mark.parametrize("k", [2, 3])
def test_classes_are_assigned_like_flowers_and_more_evenly(k: int) -> None:
    n = 100
    flower = theirs(
        partitioners.PathologicalPartitioner(
            num_partitions=n, partition_by="label", num_classes_per_partition=k, class_assignment_mode="random", seed=1
        )
    )
    mine = ours(ClassesScheme(clients=n, classes_per_client=k))
    for counts in (flower, mine):
        assert np.array_equal((counts > 0).sum(1), np.full(n, k))
        # A class is shared equally by its clients.
        assert all(np.ptp(column[column > 0]) <= 1 for column in counts.T)
    holders, mine_holders = ((counts > 0).sum(0) for counts in (flower, mine))
    assert holders.sum() == mine_holders.sum() == n * k
    assert np.ptp(mine_holders) == 0 < np.ptp(holders)
    # Of 45 pairs, 100 clients that draw independently have 40.2 on average (k = 2), with a deviation of 1.8.
    assert abs(pairs(mine) - pairs(flower)) <= 6
    assert pairs(mine) > 30
