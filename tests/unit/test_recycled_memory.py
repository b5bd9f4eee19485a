"""Reuse of memory that no other tensor refers to."""

import torch

from fedloom.core.memory import keep_freed_memory
from fedloom.models.hypernetwork import KEPT_BYTES, RecycledMemory


def test_memory_is_reused_once_nothing_refers_to_it() -> None:
    memory = RecycledMemory()
    first = memory.empty(3, 100)
    at, row, array = first.data_ptr(), first[1], first.numpy()
    assert at % 64 == 0
    del first
    second = memory.empty(3, 100)
    assert second.data_ptr() != at
    del row
    assert memory.empty(2, 100).data_ptr() != at
    del array
    third = memory.empty(2, 100)  # a smaller one fits
    assert third.data_ptr() == at
    assert third.shape == (2, 100)
    assert memory.empty(3, 101).data_ptr() != at


def test_large_blocks_are_not_kept() -> None:
    memory = RecycledMemory()
    large = memory.empty(2, KEPT_BYTES // 8 + 1)
    del large
    assert not memory._free
    assert memory.empty(0, 5).shape == (0, 5)


def test_results_in_recycled_memory_keep_their_values() -> None:
    memory, found = RecycledMemory(), []
    for i in range(5):
        tensor = memory.empty(2, 8).fill_(i)
        found.append(tensor if i % 2 else tensor.clone())
    assert [tensor.unique().tolist() for tensor in found] == [[i] for i in range(5)]


def test_keeping_freed_memory_does_not_change_its_content() -> None:
    keep_freed_memory()
    assert torch.ones(1 << 20).sum() == 1 << 20
