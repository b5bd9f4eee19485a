"""Arguments of workers and servers: ``HOST:PORT``, and the clients that a worker serves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import typer
from facts import refusing, telling
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedloom.cli.run import aggregator_command as aggregator
from fedloom.cli.worker import worker_command as worker
from fedloom.core.address import dialable, split_address
from fedloom.engine.worker import select_clients
from fedloom.errors import ExperimentError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7733", "127.0.0.1", 7733),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("localhost:65535", "localhost", 65535),
        ("fl-3_a.team-a.svc:7733", "fl-3_a.team-a.svc", 7733),
        ("[::1]:7733", "[::1]", 7733),
        ("[::]:07733", "[::]", 7733),
        ("[fe80::1%eth0]:7733", "[fe80::1%eth0]", 7733),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text, what="--listen", lowest=1) == (host, port)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[0::0]", "[::0.0.0.0]"])
def test_wildcard_addresses_are_not_shown_as_addresses_to_connect_to(host: str) -> None:
    assert dialable(f"{host}:7733") == "HOST:7733"
    for address in ("127.0.0.1:7733", "fl.team-a.svc:7733", "[::1]:7733", "[fe80::1%eth0]:7733"):
        assert dialable(address) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "foo", "foo:", ":7733", "7733", "foo:bar", "foo:-1", "foo:65536", "127.0.0.1:99999", "foo:77330000",
        "::1:7733", "[::1]", "[::1", "[foo]:7733", "[]:7733", "a b:7733", "http://foo:7733", "foo:7733/", "foo:٣",
    ],
)  # fmt: skip
def test_invalid_addresses(text: str) -> None:
    for lowest in (0, 1):
        with refusing(ExperimentError, "--listen", text, "HOST:PORT", lowest, 65535, "IPv6"):
            split_address(text, what="--listen", lowest=lowest)


def test_invalid_addresses_are_rejected_before_anything_is_read(tmp_path: Path) -> None:
    assert split_address("127.0.0.1:0", what="--listen", lowest=0) == ("127.0.0.1", 0)  # only for listening
    with refusing(ExperimentError, "--aggregator", "127.0.0.1:0", "HOST:PORT", 1, 65535):
        split_address("127.0.0.1:0", what="--aggregator", lowest=1)
    with refusing(ExperimentError, "--listen", "127.0.0.1:99999"):
        aggregator(str(tmp_path / "nowhere.yaml"), listen="127.0.0.1:99999")
    with refusing(ExperimentError, "aggregator", "foo"):
        worker(aggregator="foo", partition=str(tmp_path / "nowhere"))


def test_a_negative_wait_is_rejected() -> None:
    app = typer.Typer()
    app.command()(aggregator)
    done = CliRunner().invoke(app, ["nowhere.yaml", "--wait", "-1"])
    assert done.exit_code == 2
    assert "--wait" in done.output


@given(n=st.integers(1, 60), data=st.data())
def test_blocks_are_equal_to_one_and_contain_every_client_once_in_order(n: int, data: st.DataObject) -> None:
    everyone = [f"client-{i}" for i in range(data.draw(st.integers(n, 200)))]
    blocks = [select_clients(everyone, f"{i}/{n}") for i in range(n)]
    assert [*itertools.chain(*blocks)] == everyone
    sizes = {len(block) for block in blocks}
    assert max(sizes) - min(sizes) <= 1
    assert 0 not in sizes
    assert select_clients(["a", "b"], None) == ["a", "b"]
    assert select_clients(["a", "b"], "b, c,") == ["b", "c"]


@pytest.mark.parametrize("part", ["2/2", "0/4", "0/0", "-1/2", "1/2/3", "a/b", "/", "1 /2", "٣/٤", "a,0/2"])
def test_invalid_blocks(part: str) -> None:
    with telling(ExperimentError, "clients", "I/N", part) as refused:
        select_clients(["a", "b", "c"], part)
    assert "3" in str(refused.value)
    for clients in ("", ",", " , "):
        with pytest.raises(ExperimentError, match=r"clients must .*2 clients"):
            select_clients(["a", "b"], clients)
