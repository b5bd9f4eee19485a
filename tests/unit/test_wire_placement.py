"""Placement of rows: each is placed once, in equal shares, on a worker with its data."""

import hypothesis.strategies as st
from hypothesis import given

from fedloom.transport.exchanges import deal

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
