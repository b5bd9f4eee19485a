"""Every published vulnerability of similar systems has a test (docs/security.md); some are in this file."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.algorithms.base import find_algorithm
from fedloom.errors import ExperimentError
from fedloom.transport.dial import CHANNEL_OPTIONS
from fedloom.transport.server import SERVER_OPTIONS

ROOT = Path(__file__).parents[2]
RUNS_CODE = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execl", "os.execlp", "os.spawnl",
    "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "marshal.load", "marshal.loads",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip


def test_the_page_names_existing_tests() -> None:
    _, _, table = (ROOT / "docs" / "security.md").read_text().partition("\n## Holes of other systems")
    table, _, _ = table.partition("\n## ")
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), (file, name)


def running(code: str) -> Iterator[tuple[int, str]]:
    """Return the calls that execute their input."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in RUNS_CODE:
            yield node.lineno, called
        for keyword in node.keywords:
            if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                yield node.lineno, "shell"


@pytest.mark.slow
def test_untrusted_input_is_never_executed() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in (ROOT / "src").rglob("*.py")
        for line, what in running(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "code", ["eval('1')", "import os\nos.system(x)", "subprocess.run(x, shell=True)", "torch.jit.load(f)"]
)
def test_calls_that_execute_code_are_detected(code: str) -> None:
    assert len(list(running(code))) == 1


@pytest.mark.parametrize(
    "name", ["antigravity:fly", "antigravity.fly", "fedloom.algorithms.fedavg:FEDAVG", "../fedavg", "os"]
)
def test_a_method_is_only_found_by_its_registered_name(name: str) -> None:
    """An aggregator names the method that its workers run, and must not make them import anything."""
    with pytest.raises(ExperimentError, match="fedavg"):
        find_algorithm(name)
    assert "antigravity" not in sys.modules


def test_keepalive_pings_respect_the_servers_minimum_interval() -> None:
    """Otherwise gRPC ends a connection with GOAWAY, too_many_pings."""
    ours, allowed = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert ours["grpc.keepalive_time_ms"] >= 2 * allowed["grpc.http2.min_ping_interval_without_data_ms"]
