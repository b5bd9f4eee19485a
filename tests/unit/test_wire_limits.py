"""Limits for untrusted peers: token buckets, log lines, file descriptors."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from fedloom.transport.exchanges import Clients
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
