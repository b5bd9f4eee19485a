"""Limits for untrusted peers, and the placement of rows on workers."""

from __future__ import annotations

import logging
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fedloom.transport.exchanges import Clients, deal
from fedloom.transport.limits import CONNECTIONS, RateLimitFilter, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_token_bucket_refills_up_to_its_capacity() -> None:
    clock = Clock()
    budget = TokenBucket(3, 2, clock)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    clock.now = 0.5
    assert [budget.spend() for _ in range(2)] == [True, False]
    clock.now = 100.0
    assert [budget.spend(2), budget.spend(1), budget.spend(0.1)] == [True, True, False]


def test_log_lines_of_one_kind_are_rate_limited_and_omissions_counted() -> None:
    clock, reported = Clock(), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.append(record.getMessage())

    log = logging.Logger("rationed")
    log.addHandler(Keep())
    log.addFilter(RateLimitFilter(clock))
    for i in range(1_000):
        log.warning("refused %d", i)
    log.warning("something else")
    assert len(reported) == 21
    clock.now = 2.0
    log.warning("refused %d", 1_000)
    assert reported[-1] == "refused 1000 (and 980 more of this kind)"
    clock.now = 4.0
    log.warning("refused %d", 1_001)
    assert reported[-1] == "refused 1001"


def test_clients_are_a_subset_of_the_runs() -> None:
    index = {f"c{i}": i for i in range(20)}
    some = Clients(index, ["c3", "c17", "c3"])
    assert list(some) == ["c3", "c17"]
    assert len(some) == 2
    assert "c17" in some
    assert "c4" not in some
    assert "stranger" not in some
    assert [i for i, there in enumerate(some.mask) if there] == [3, 17]
    with pytest.raises(KeyError):
        Clients(index, ["stranger"])


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("limit", "expected"), [(64, 16), (400, 144), (1_400, CONNECTIONS)])
def test_file_descriptors_are_reserved_for_files(limit: int, expected: int) -> None:
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, {limit}))\n"
        "from fedloom.transport.limits import connections\n"
        "print(connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found, soft = map(int, output.stdout.split())
    assert found == expected
    assert soft == min(limit, CONNECTIONS + 256)


CLIENTS = [f"client-{i}" for i in range(6)]


@given(st.lists(st.sampled_from(CLIENTS), max_size=30), st.integers(1, 5))
def test_equal_shares_in_order_if_all_workers_may_serve(clients, workers):
    shares = deal(clients, {f"w{i}": set(CLIENTS) for i in range(workers)})
    sizes = [len(shares.get(f"w{i}", [])) for i in range(workers)]
    assert max(sizes) - min(sizes) <= 1
    assert [row for name in sorted(shares) for row in shares[name]] == list(range(len(clients)))


@given(
    st.lists(st.sampled_from(CLIENTS), max_size=30),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sets(st.sampled_from(CLIENTS))),
    st.randoms(use_true_random=False),
)
def test_each_row_is_placed_once_where_allowed_for_any_order_of_workers(clients, workers, random):
    shares = deal(clients, workers)
    dealt = sorted(row for share in shares.values() for row in share)
    assert dealt == [row for row, client in enumerate(clients) if any(client in may for may in workers.values())]
    assert all(clients[row] in workers[name] for name, share in shares.items() for row in share)
    assert all(share == sorted(share) for share in shares.values())
    names = list(workers)
    random.shuffle(names)
    assert deal(clients, {name: workers[name] for name in names}) == shares


def test_data_on_one_worker_are_served_there_and_the_rest_is_balanced():
    shares = deal(["x", "x", "y", "y", "y", "y"], {"a": {"x", "y"}, "b": {"y"}})
    assert shares == {"a": [0, 1, 2], "b": [3, 4, 5]}


def test_busy_workers_get_fewer_rows():
    assert deal(["x"] * 4, {"a": {"x"}, "b": {"x"}}, loads={"a": 2}) == {"a": [0], "b": [1, 2, 3]}
