"""Clients served by a worker: all, named ones, or one of N equal blocks."""

from __future__ import annotations

import itertools

import pytest
from facts import tells
from hypothesis import given
from hypothesis import strategies as st

from fedloom.engine.worker import select_clients
from fedloom.errors import ExperimentError


@given(n=st.integers(1, 60), data=st.data())
def test_blocks_are_equal_to_one_and_contain_every_client_once_in_order(n: int, data: st.DataObject) -> None:
    everyone = [f"client-{i}" for i in range(data.draw(st.integers(n, 200)))]
    blocks = [select_clients(everyone, f"{i}/{n}") for i in range(n)]
    assert [*itertools.chain(*blocks)] == everyone
    sizes = {len(block) for block in blocks}
    assert max(sizes) - min(sizes) <= 1
    assert 0 not in sizes


def test_all_and_named_clients() -> None:
    assert select_clients(["a", "b"], None) == ["a", "b"]
    assert select_clients(["a", "b"], "b, c,") == ["b", "c"]


@pytest.mark.parametrize("part", ["2/2", "0/4", "0/0", "-1/2", "1/2/3", "a/b", "/", "1 /2", "٣/٤", "a,0/2"])
def test_invalid_blocks(part: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        select_clients(["a", "b", "c"], part)
    assert tells(str(refused.value), "clients", "I/N", part)
    assert "3" in str(refused.value)


@pytest.mark.parametrize("clients", ["", ",", " , "])
def test_empty_blocks(clients: str) -> None:
    with pytest.raises(ExperimentError, match=r"clients must .*2 clients"):
        select_clients(["a", "b"], clients)
