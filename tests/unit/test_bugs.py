"""A bug in a method or a model is raised in place in one process, or reported by its line, never as a lost client."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
import yaml
from facts import mentions, tells
from federations import Federation, clients, federation, setup, variant
from forked import run
from test_local_data import TASK, people
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.base import Algorithm, ClientAlgorithm
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.errors import DataError, QuorumError, raised_at
from fedloom.federation.silence import Silence
from fedloom.federation.transport import Call, ConversationKey, Lost, Refusals, Traffic
from fedloom.federation.validation import is_bug, place, safe_reason
from fedloom.messages import Message

SETTINGS = FedAvgSettings(local=LocalSGD(steps=1, batch_size=2))


def with_client(fault: Callable[[ClientGroup], None]) -> Algorithm:
    """Return FedAvg whose clients do something before they answer."""

    def client(settings: Any, problem: Any) -> ClientAlgorithm:
        half = FEDAVG.client(settings, problem)
        honestly = half.open

        def opened(group: ClientGroup, opening: Message) -> Any:
            fault(group)
            return honestly(group, opening)

        half.open = opened  # type: ignore[method-assign]
        return half

    return variant(FEDAVG, client=client)


def made(folder: Path, fault: Callable[[ClientGroup], None], **keys: Any) -> Federation:
    f = federation(folder, with_client(fault), SETTINGS, setup(), clients([4, 5, 6]), **keys)
    f.loop.schedule = dataclasses.replace(f.loop.schedule, attempts=3)
    return f


class Elsewhere:
    """Transport that behaves like a wire: exceptions are not passed on, and bytes are counted."""

    def __init__(self, transport: Any) -> None:
        self.traffic, self.refusals, self.silence = Traffic(0, 0), Refusals(), Silence()
        self._transport = transport
        transport._client_side.raises_bugs = False

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        given = call.key, call.exchange, call.rows, call.clients, call.message, call.states
        found = dict(self._transport._client_side.answer(*given))
        return [found[row] for row in call.rows]

    def close(self, key: ConversationKey) -> None:
        self._transport.close(key)


def typo(group: ClientGroup) -> None:
    if group.clients[0].id == "c1":
        group.generatr(0, "train")  # type: ignore[attr-defined]


def everywhere(group: ClientGroup) -> None:
    group.generatr(0, "train")  # type: ignore[attr-defined]


LINE = inspect.getsourcelines(everywhere)[1] + 1


@pytest.mark.parametrize(
    ("error", "bug"),
    [
        (DataError("no labels"), False),
        (FloatingPointError("not finite"), False),
        (OverflowError("too large"), False),
        (torch.linalg.LinAlgError("singular"), False),
        (AttributeError("a typo"), True),
        (RuntimeError("a shape"), True),
        (ZeroDivisionError("a count"), True),
        (ArithmeticError("a contract"), True),
    ],
)
def test_exceptions_that_lose_a_client(error: Exception, bug: bool) -> None:
    assert is_bug(error) is bug
    assert safe_reason(error)


def test_a_client_bug_in_process_is_raised_at_the_first_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    f = made(tmp_path, lambda group: None, rounds=2)
    f.run()
    before = f.state
    f = made(tmp_path, typo, rounds=4)
    f.loop.resume()
    with pytest.raises(AttributeError, match="generatr") as raised:
        f.run()
    assert "typo" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert mentions("".join(raised.value.__notes__), "c1", "round 3", "exchange 0", "SharedModel")  # whose, and when
    assert not any(record.exc_info for record in caplog.records)  # its traceback is shown once
    assert f.loop.round == 2
    assert all(torch.equal(mine, f.state[key]) for key, mine in before.items())
    assert all(attempt.outcome in ("done", "evaluated") for attempt in f.loop.journal.attempts)
    again = made(tmp_path, lambda group: None, rounds=4)  # without the bug
    again.loop.resume()
    again.run()
    assert again.loop.round == 4


def test_an_error_in_a_clients_data_loses_only_that_client(tmp_path: Path) -> None:
    def own(group: ClientGroup) -> None:
        if group.clients[0].id == "c1":
            raise torch.linalg.LinAlgError("the kernel of Jane Doe is singular")

    f = made(tmp_path, own, rounds=1)
    f.run()
    (lost,) = [loss for a in f.loop.journal.attempts if a.attempt for c in a.conversations for loss in c.lost]
    assert lost.client == "c1"
    assert tells(lost.reason, "LinAlgError", "test_bugs.py", "line")
    assert "Jane" not in lost.reason


@pytest.mark.parametrize("fault", [typo, everywhere])
def test_a_client_bug_over_the_wire_is_reported_with_class_and_line(
    fault: Callable[[ClientGroup], None], tmp_path: Path
) -> None:
    f = made(tmp_path, fault, rounds=1)
    f.loop.transport = Elsewhere(f.loop.transport)
    if fault is typo:
        f.run()
        reasons = [loss.reason for a in f.loop.journal.attempts for c in a.conversations for loss in c.lost]
        assert reasons
        assert all(tells(reason, "bug: ", "AttributeError", "test_bugs.py", "line") for reason in reasons)
        assert not any("generatr" in reason for reason in reasons)
        return
    f.loop.schedule = dataclasses.replace(f.loop.schedule, evaluate_every=5)
    f.loop._evaluated = 0
    with pytest.raises(QuorumError) as error:
        f.run()
    assert tells(str(error.value), "3 clients", "bug", "AttributeError", "test_bugs.py", f"line {LINE}")


class Checked(pydantic.BaseModel):
    value: int


def test_a_server_bug_is_raised_in_process_and_reported_with_its_line(tmp_path: Path) -> None:
    def broken(round: Any) -> Any:
        return Checked(value="no number")  # type: ignore[arg-type]

    f = made(tmp_path, lambda group: None, rounds=1)
    f.loop.server.train_round = broken  # type: ignore[method-assign]
    with pytest.raises(pydantic.ValidationError) as raised:
        f.run()
    line = inspect.getsourcelines(broken)[1] + 1
    assert place(raised.value) == f"test_bugs.py, line {line}"
    f = made(tmp_path / "far", lambda group: None, rounds=1)
    f.loop.transport = Elsewhere(f.loop.transport)
    f.loop.server.train_round = broken  # type: ignore[method-assign]
    with pytest.raises(QuorumError) as error:
        f.run()
    assert tells(str(error.value), "ValidationError", f"test_bugs.py, line {line}", "log")
    assert [a.attempt for a in f.loop.journal.attempts if a.attempt] == [1, 2, 3]


def test_tracebacks_point_to_the_users_code_before_fedlooms() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2).view(3)
    assert place(raised.value).startswith("test_bugs.py, line")
    with pytest.raises(ValueError, match="shape") as ours:
        setup().model.layout.split(torch.zeros(1))
    at = raised_at(ours.value)
    assert Path(at.filename) == Path(__file__)
    assert raised_at(ValueError("never raised")) is None


MODULE = """
from torch import nn

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        if len(x) > 3 and self.training:
            return self.lats(x)
        return self.last(x)

def late():
    return Late()
"""


class Late(nn.Module):
    """Module that fails on more inputs than the check uses."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3 and self.training:
            raise KeyError("a branch that nobody tried")
        logits: Tensor = self.last(x)
        return logits


@pytest.mark.slow
def test_a_module_bug_that_no_check_finds_is_raised(tmp_path: Path) -> None:
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    with pytest.raises(KeyError, match="nobody tried") as raised:
        fedloom.run(TASK, data=data, model=Late(), out=tmp_path / "run", report=False, progress=False)
    assert place(raised.value).startswith("test_bugs.py")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_command_shows_a_traceback_or_the_line_and_the_workers_log(workers: int, tmp_path: Path) -> None:
    (tmp_path / "late_models.py").write_text(MODULE)
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    tree = {
        **TASK,
        "data": data.section,
        "model": {"name": "module", "factory": "late_models:late"},
        "federation": {"rounds": 1, "clients_per_round": 2, "attempts": 1},
        "runtime": {"workers": workers},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(tree))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FEDLOOM_DATA": str(tmp_path / "data")}
    command = [sys.executable, "-m", "fedloom", "run", "experiment.yaml", "--out", "run", "--no-report"]
    ended = run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    line = MODULE.splitlines().index("            return self.lats(x)") + 1
    if workers:
        assert ended.returncode == 5, ended.stderr
        assert tells(ended.stderr, "2 clients", "bug", "AttributeError", f"late_models.py, line {line}")
        logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("worker*"))
        assert tells(logs, "Traceback", "late_models.py", "lats")
    else:
        assert ended.returncode == 1, ended.stderr
        assert tells(ended.stderr, "Traceback", f'late_models.py", line {line}', "AttributeError", "lats")
