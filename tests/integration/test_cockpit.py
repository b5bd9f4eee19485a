"""Views of a member's worker: a screen, lines, JSON, probes and metrics, with real aggregators over gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pytest
import torch
import yaml
from forked import Popen
from ports import free_address
from prometheus_client.parser import text_string_to_metric_families
from run_processes import ENVIRONMENT, FEDLOOM, ended, until
from test_health_port import probe
from test_member_hostile import BASE, NOISE, Hostile, Wire, changed, keys, recorded
from test_open_federation import CLASS_NAMES, Federation, members
from transport_support import make_aggregator

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.fedavg import PersonalizeRequest, SharedModel
from fedloom.engine.options import WorkerOptions
from fedloom.federation.standing import Standing
from fedloom.federation.worker_record import PHASES, WorkerRecord
from fedloom.member.cockpit import Cockpit, screen_lines, worker_families
from fedloom.security.options import ClientOptions

__all__ = ["keys", "members", "recorded"]

EXPERIMENT = f"""\
name: vowels
data: {{own: {{kind: features, input_shape: [9], classes: [{", ".join(CLASS_NAMES)}]}}}}
model: {{name: mlp, hidden: [6]}}
algorithm: {{name: fedavg, local: {{steps: 2, lr: 0.1}}}}
federation: {{rounds: 30, clients_per_round: 2, min_clients: 2, deadline_s: 30, checkpoint_every_s: 0}}
evaluation: {{every: 10, cohort: 2}}
runtime: {{workers: 0}}
"""

RESULT_FIELDS = {"round", "value", "best_round", "best"}
DATA_FIELDS = {
    "event", "rounds", "best_round", "seconds", "sent_bytes", "received_bytes", "epsilon", "delta", "unanswered",
    "metric", "results",
}  # fmt: skip
"""Fields that docs/member.md lists."""


@pytest.fixture
def federation(tmp_path: Path, members: Path) -> Iterator[Federation]:
    with contextlib.ExitStack() as processes:
        yield Federation(tmp_path, members, processes, EXPERIMENT)


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def samples(address: str) -> dict[tuple[str, ...], float]:
    """Return all samples of a worker's metrics by name and values of labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(get(address, "/metrics"))
        for sample in family.samples
    }


# --- a terminal -------------------------------------------------------------------------------------------------------


class Terminal:
    """Terminal of 200 columns: rows as they stand after control sequences, as an xterm applies them."""

    SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")

    def __init__(self) -> None:
        self.rows, self.row, self.column, self.repaints = [""], 0, 0, 0

    def feed(self, text: str) -> None:
        while text:
            found = self.SEQUENCE.match(text)
            if found:
                private, number, command = found.groups()
                assert command in "AKmhl", found[0]  # nothing else is sent
                if command == "A":
                    self.row -= int(number or 1)
                    self.repaints += 1
                if command == "K" and not private:
                    self.rows[self.row] = ""
                text = text[found.end() :]
                continue
            character, text = text[0], text[1:]
            assert character in "\r\n" or character.isprintable(), f"{character!r} reaches the terminal"
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            else:
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
                self.column += 1


def on_a_terminal(*words: object, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command on a terminal; return its exit code and all that it has written there."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    given = {**ENVIRONMENT, "TERM": "xterm", **(environment or {})}
    process = Popen(
        [*FEDLOOM, *map(str, words)], env=given, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not data:
            break
        written += data
    os.close(ours)
    return process.wait(60), written.decode()


def test_terminal_shows_one_screen_that_repaints(federation: Federation, tmp_path: Path) -> None:
    federation.aggregator()
    federation.worker(1, name="other")
    words = ("worker", "--aggregator", federation.address, "--name", "north", "--data", federation.members / "s0")
    code, written = on_a_terminal(*words, "--out", tmp_path / "models")
    assert code == 0, written
    terminal = Terminal()
    terminal.feed(written)
    shown = "\n".join(terminal.rows)
    assert terminal.repaints > 2, shown
    heading = terminal.rows.index("north · vowels")
    names = [row[:12].strip() for row in terminal.rows[heading + 1 :] if not row.startswith("INFO")]
    assert names[:4] == ["aggregator", "clients", "result", "result"], shown
    assert {"time", "sent", "received"} <= set(names)
    assert terminal.rows.count("north · vowels") == 1, "an earlier screen is left over"
    assert re.search(
        r"^result +personal model: accuracy 0\.\d{4} after round 30, best 0\.\d{4} after round", shown, re.M
    )
    assert re.search(r"^result +shared model: accuracy", shown, re.M)
    assert re.search(r"^sent .*updates .*", shown, re.M)
    lines = [row for row in terminal.rows if "joined run" in row or "its models of rounds" in row]
    assert len(lines) >= 2, shown
    assert all(line.startswith("INFO fedloom.") for line in lines), "a line of the log is torn"
    assert str(tmp_path / "models" / "speaker-0") in lines[-1]


@pytest.mark.slow
def test_no_screen_on_kubernetes_or_with_json(federation: Federation) -> None:
    federation.aggregator()
    federation.worker(1, name="other")
    pod = threading.Thread(target=lambda: outputs.append(on_a_terminal(
        "worker", "--aggregator", federation.address, "--data", federation.members / "s2",
        environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    )))  # fmt: skip
    outputs: list[tuple[int, str]] = []
    pod.start()
    code, written = on_a_terminal(
        "--log-format", "json", "worker", "--aggregator", federation.address, "--data", federation.members / "s0"
    )
    pod.join()
    assert (code, outputs[0][0]) == (0, 0)
    assert "\x1b" not in written + outputs[0][1]
    assert [json.loads(line) for line in written.splitlines()]
    assert "evaluated; personal model: accuracy" in outputs[0][1]


@pytest.mark.slow
def test_json_lines_have_the_documented_fields(federation: Federation, tmp_path: Path) -> None:
    federation.aggregator()
    federation.worker(1, name="other")
    command = ["--log-format", "json", "worker", "--aggregator", federation.address, "--reconnect", "200"]
    command += ["--data", str(federation.members / "s0"), "--out", str(tmp_path / "models")]
    process = Popen([*FEDLOOM, *command], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [json.loads(line) for line in ended(process, 0).splitlines()]
    events = {}
    for line in lines:
        if "data" in line:
            events.setdefault(line["data"]["event"], []).append(line)
    assert {"joined", "round", "evaluated", "models", "ended"} <= set(events)
    for event in ("round", "evaluated", "ended"):
        for line in events[event]:
            assert set(line["data"]) == DATA_FIELDS
            assert line["run"] == "vowels"
            assert set(line["data"]["seconds"]) == set(PHASES)
    last = events["ended"][-1]
    assert (last["round"], last["data"]["rounds"], last["data"]["metric"]) == (30, 30, "accuracy")
    assert set(last["data"]["results"]) == {"personal", "global"}
    for result in last["data"]["results"].values():
        assert set(result) == RESULT_FIELDS
        assert result["round"] == 30
        assert result["best"] >= result["value"]
    assert {"announcements", "updates", "measurements"} <= set(last["data"]["sent_bytes"])
    assert last["data"]["seconds"]["training"] > 0
    assert last["data"]["unanswered"] == 0
    (kept,) = events["models"]
    assert Path(kept["data"]["folder"]).is_dir()
    assert kept["data"]["last"] == 30


# --- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_probes_follow_the_connection(federation: Federation) -> None:
    health, metrics = free_address(), free_address()
    watched = federation.worker(0, name="watched", more=("--health", health, "--metrics", metrics))

    def states() -> tuple[int, int]:
        try:
            return probe(health), probe(health, "/readyz")
        except (urllib.error.URLError, ConnectionError):
            return 0, 0

    def connected() -> float:
        return samples(metrics)["fedloom_worker_connected",]

    until(lambda: states() == (200, 503), "a worker that is healthy and has not joined")
    assert probe(health, "/metrics") == 404
    assert connected() == 0
    federation.worker(1, name="other")
    for turn in range(2):
        aggregator = federation.aggregator(*(["--resume"] * turn), "--set", "federation.rounds=100000")
        until(lambda: states() == (200, 200), "joined")
        until(lambda: connected() == 1, "connected, by its metrics")
        until(lambda: samples(metrics).get(("fedloom_worker_round",), 0) > 2, "rounds")
        aggregator.kill()
        aggregator.wait()
        until(lambda: states() == (200, 503), "lost")
        assert connected() == 0
    found = samples(metrics)
    assert found["process_resident_memory_bytes",] > 1e6
    assert found["fedloom_worker_seconds_total", "disconnected"] > 0
    assert found["fedloom_worker_seconds_total", "training"] > 0
    assert found["fedloom_worker_sent_bytes_total", "updates"] > 0
    assert watched.poll() is None


def test_a_port_that_is_taken_ends_the_worker(federation: Federation, members: Path) -> None:
    from fedloom.engine.worker import Worker
    from fedloom.errors import ExperimentError

    health = free_address()
    federation.worker(0, name="first", more=("--health", health))

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return probe(health) == 200
        return False

    until(answers, "the first worker's probe")
    second = Worker(federation.address, "second", WorkerOptions(packed=(members / "s1",), health=health))
    with pytest.raises(ExperimentError) as raised:
        second.serve(threading.Event())
    assert raised.value.key == "health"


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_equal_what_the_other_side_counts(
    tmp_path: Path, members: Path, recorded: Wire, keys: ClientOptions
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump({"privacy": {"noise_multiplier": 1.5, "epsilon": 50.0}, "folder": "kept"}))
    cockpit = Cockpit("w")

    class Watched(Hostile):
        record = cockpit

    options = WorkerOptions(packed=(members / "s0",), policy=policy, trust=keys)
    hostile = Watched(changed(BASE, federation=NOISE), members / "s0", options)
    assert hostile.joined()
    for _ in range(3):
        hostile.ask(SharedModel(hostile.model()), seconds=60)
        measured = hostile.ask(PersonalizeRequest(hostile.model()), "evaluate", again=True, seconds=60)
    hostile.ask(SharedModel(hostile.model()), "evaluate", seconds=60)  # refused
    traffic = hostile.server.traffic

    def equal() -> bool:
        state = cockpit.state()
        return (sum(state.sent.values()), sum(state.received.values())) == (traffic.up, traffic.down)

    until(equal, "the same bytes on both sides", 60)
    state = cockpit.state()
    assert sum(state.sent.values()) == sum(map(len, recorded.frames))
    carried: Counter[str] = Counter()
    for begin in recorded.parts("begin"):
        carried[begin.envelope.message] += begin.total_bytes
    assert carried["Update"] > 0
    for kind, message in (("updates", "Update"), ("measurements", "Metrics")):
        overhead = state.sent[kind] - carried[message]
        assert 0 < overhead < 3 * 1000, (kind, overhead)
    assert (state.lost, "purpose" in state.lost_reason or "opens" in state.lost_reason) == (1, True)
    spent = cockpit.spent()
    assert spent is not None
    assert 0 < spent[0] < 50
    hostile.stop_worker()
    hostile.server.stop()
    correct, total = measured.counts[0, :, 1, 0, :2].unbind(-1)  # type: ignore[union-attr]
    expected = dict(zip(("personal", "global"), (correct / total).tolist(), strict=True))
    state = cockpit.state()
    assert {name: state.own(name)["value"] for name in state.results} == pytest.approx(expected)
    assert {tuple(rounds) for rounds in state.results.values()} == {(1, 2, 3)}


def cockpit_key() -> Any:
    from fedloom.federation.transport import ConversationKey

    return ConversationKey(0, 0, 0, "evaluate")


def test_phases_divide_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    observer = WorkerRecord(lambda: clock[0])

    def after(seconds: float) -> None:
        clock[0] += seconds

    after(1)
    observer.joined("run")
    after(2)
    observer.transferring(1)
    after(4)
    observer.answering(replace(cockpit_key(), purpose="train"))
    after(8)  # a message that arrives meanwhile takes no time of its own
    observer.answering(None)
    observer.transferring(-1)
    observer.answering(cockpit_key())
    after(16)
    observer.answering(None)
    observer.transferring(2)
    observer.disconnected("gone")
    after(32)
    observer.joined("run")
    after(64)  # transfers of the lost connection are over
    assert observer.state().seconds == {
        "disconnected": 33, "waiting": 66, "transfer": 4, "training": 8, "evaluation": 16,
    }  # fmt: skip


# --- hostile aggregators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {"round": 2**60}, {"round": -1}, {"rounds": 10**300}, {"best_round": -5}, {"members": 2**64}, {"awaited": -1},
    {"remaining_s": 1e300}, {"connected": 2**54}, {"phase": "\x1b[2J"}, {"doing": "\x1b]0;x\x07"},
])  # fmt: skip
def test_absurd_standings_are_refused(change: dict[str, Any]) -> None:
    honest = json.loads(Standing("training", 3, 10, 4, 2, 5, 5, 2, 60.0).to_json())
    assert Standing.parse(json.dumps(honest)).round == 3
    with pytest.raises(ValueError):
        Standing.parse(json.dumps({**honest, **change}))
    for number in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError):
            Standing.parse(json.dumps({**honest, "remaining_s": 0.5}).replace("0.5", number))


def test_every_allowed_standing_has_words() -> None:
    largest = Standing("training", 2**53, 2**53, 2**53, 2**53, 2**53, 2**53, 2**53, float(2**53))
    assert "waits for" in largest.in_words(time.time())
    noon = time.mktime((2026, 11, 29, 14, 0, 0, 0, 0, -1))
    now = Standing("training", 6, 100, 7, 5, 5, 5, 2, 300.0)
    assert now.in_words(noon) == "training round 7 of 100, best round 5, waits for 2 of 5 members until 14:05"
    assert now.waits(noon + 86_400) == "waits for 2 of 5 members until 14:05"
    assert replace(now, remaining_s=None).waits(noon) == "waits for 2 of 5 members"
    assert replace(now, phase="waiting", awaited=0, connected=2, best_round=None).in_words(noon) == (
        "waiting, 2 of 5 members connected"
    )
    assert replace(now, phase="paused", awaited=0).in_words(noon).startswith("paused after round 6 of 100")


def test_texts_of_others_never_reach_the_terminal_raw() -> None:
    bad = "\x1b[2J\x1b]0;owned\x07\r\n\u202e[bold]x[/bold]\x9b31m"
    observer = WorkerRecord(in_detail=True)
    observer.joined(bad)
    observer.lost(bad, bad)
    observer.told(Standing("waiting"))
    observer.disconnected(bad)
    lines = screen_lines(observer.state(), "w", None)
    assert any("[bold]x[/bold]" in line.plain for line in lines)
    assert all(character.isprintable() for line in lines for character in line.plain)


def test_hostile_aggregators_do_not_write_on_the_terminal(members: Path) -> None:
    """The name of the run, and the experiment that an error quotes, come over gRPC."""
    bad = "\x1b[2J\x1b]0;owned\x07\r\u202eevil"
    aggregator = make_aggregator(
        name=bad,
        algorithm="fedavg",
        version=find_algorithm("fedavg").version,
        experiment=json.dumps({"experiment": json.dumps({bad: bad})}),
        clients=["speaker-0"],
    )
    address = aggregator.start("127.0.0.1:0")
    try:
        words = ("worker", "--aggregator", address, "--data", members / "s0", "--clients", "speaker-0")
        code, written = on_a_terminal(*words)
    finally:
        aggregator.stop()
    assert code == 2, written
    terminal = Terminal()
    terminal.feed(written)  # refuses control characters
    assert "evil" in written


def test_worker_that_waits_for_approval_says_so(tmp_path: Path, members: Path, keys: ClientOptions) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump({"approve": "ask", "folder": "kept"}))
    cockpit = Cockpit("w")

    class Watched(Hostile):
        record = cockpit

    hostile = Watched(BASE, members / "s0", WorkerOptions(packed=(members / "s0",), policy=policy, trust=keys))
    try:
        until(lambda: not cockpit.state().allowed, "disconnected by the policy", 60)
        state = cockpit.state()
        lines = "\n".join(line.plain for line in screen_lines(state, "w", None))
        assert re.search(r"^aggregator +not connected: .*waits for the member's approval", lines, re.MULTILINE)
        found = {sample.name: sample.value for family in worker_families(state, None) for sample in family.samples}
        assert (found["fedloom_worker_connected"], found["fedloom_worker_allowed"]) == (0, 0)
    finally:
        hostile.stop_worker()
        hostile.server.stop()


@pytest.mark.parametrize("loaded", [True, False])
def test_metrics_of_a_gpu(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    def utilization(device: int) -> int:
        if not loaded:
            raise ModuleNotFoundError("nvidia-ml-py is not installed")
        return 50

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4096)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    found = {
        sample.name: sample.value
        for family in worker_families(WorkerRecord().state(), None)
        for sample in family.samples
        if "gpu" in sample.name
    }
    assert found == {
        "fedloom_worker_gpu_memory_bytes": 4096,
        **({"fedloom_worker_gpu_utilization": 0.5} if loaded else {}),
    }


def test_names_of_messages_add_no_kinds_of_bytes() -> None:
    """An aggregator may name a message and a purpose as it likes."""
    observer = WorkerRecord(in_detail=True)
    for i in range(1000):
        for sending in (True, False):
            observer.moved(1, f"x{i}", f"p{i}", sending=sending)
            observer.moved(1, f"x{i}", "", sending=sending)
    state = observer.state()
    assert (dict(state.sent), dict(state.received)) == (
        {"personalization": 1000, "other": 1000},
        {"models": 1000, "other": 1000},
    )
