"""Policies of a member against hostile aggregators over mutual TLS: the wire is recorded, nothing forbidden leaves."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from facts import mentions
from run_processes import fedloom
from test_open_federation import CLASS_NAMES, GIVEN, members

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.fedavg import PersonalizeRequest, SharedModel
from fedloom.data.own import OwnClients, own_manifest
from fedloom.data.spec import Normalization
from fedloom.engine import assemble
from fedloom.engine.distributed import welcome
from fedloom.engine.options import WorkerOptions
from fedloom.engine.worker import Worker
from fedloom.errors import RefusedError
from fedloom.experiment import parse_experiment
from fedloom.federation.measuring import VOCABULARY as MEASURING
from fedloom.federation.measuring import MeasureInputs
from fedloom.federation.roster import AvailableClients
from fedloom.federation.transport import Call, ConversationKey, Lost
from fedloom.federation.worker_record import WorkerRecord
from fedloom.member import guard
from fedloom.member.approvals import Approvals, experiment_digest
from fedloom.messages import Message, Metrics, SummedMetrics, answer_shapes
from fedloom.privacy.accounting import epsilon_of, sampled
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import ClientOptions, Protection, ServerOptions
from fedloom.sums.messages import VOCABULARY as SUMMING
from fedloom.sums.messages import AnswerReady, SumSession
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.codec import read_specs
from fedloom.transport.exchanges import ServedRun
from fedloom.transport.frames import read_parts
from fedloom.transport.receiver import Receiver
from fedloom.transport.wire import federation_pb2 as wire

__all__ = ["members"]

VICTIM = "speaker-0"
BASE: dict[str, Any] = yaml.safe_load(
    f"""
name: vowels
data: {{own: {{kind: features, input_shape: [9], classes: [{", ".join(CLASS_NAMES)}], normalization: {GIVEN}}}}}
model: {{name: mlp, hidden: [6]}}
algorithm: {{name: fedavg, local: {{steps: 2, lr: 0.1, batch_size: 8}}}}
federation: {{rounds: null, clients_per_round: 5, min_clients: 2, deadline_s: 3}}
"""
)
SUMS = {"secure_aggregation": {"signatures": "keys", "examples": 1000}, "min_clients": 5}
NOISE = {"privacy": {"of": "examples", "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}}


def changed(experiment: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment with other keys in some sections."""
    found = copy.deepcopy(experiment)
    for section, keys in sections.items():
        found[section] = {**found.get(section, {}), **keys}
    return found


# --- what leaves ------------------------------------------------------------------------------------------------------


class Wire:
    """Everything that workers have sent to the aggregators of a test."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def parts(self, kind: str) -> list[Any]:
        return [part for data in self.frames for found, part in read_parts(wire.WorkerFrame, data) if found == kind]

    def names(self) -> list[str]:
        """Return the class of each answer that has left, by row."""
        return [begin.envelope.message for begin in self.parts("begin") for _ in begin.envelope.rows]

    def contents(self, name: str) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of each answer of a class."""
        chunks: dict[int, bytes] = {}
        for chunk in self.parts("chunk"):
            chunks[chunk.transfer] = chunks.get(chunk.transfer, b"") + bytes(chunk.data)
        for begin in self.parts("begin"):
            if begin.envelope.message != name:
                continue
            data, at = chunks.get(begin.transfer, b""), 0
            found = {}
            for spec in read_specs(begin.envelope):
                size = int(torch.tensor(spec.shape).prod()) * spec.dtype.itemsize
                if not size:
                    found[spec.name] = torch.zeros(0)
                elif len(data[at : at + size]) == size:
                    found[spec.name] = torch.frombuffer(bytearray(data[at : at + size]), dtype=spec.dtype)
                at += size
            yield found

    def reasons(self) -> list[str]:
        return [part.reason for part in (*self.parts("declined"), *self.parts("row_lost"))]


class Hostile:
    """An aggregator whose experiment and questions a test chooses, and the victim's worker, which may restart."""

    record: WorkerRecord | None = None

    def __init__(self, experiment: dict[str, Any], packed: Path, options: WorkerOptions) -> None:
        self._packed = OwnClients.open([packed], [])
        self._options = options
        parts, text = self._parts(experiment)
        self.sizes = {"s": parts.setup.model.layout.size}
        self.plan = parts.plan
        run = ServedRun(
            name="vowels",
            incarnation="a0",
            experiment=text,
            algorithm="fedavg",
            version=parts.algorithm.version,
            vocabulary={m.__name__: m for m in (*parts.algorithm.messages, Metrics, SummedMetrics)}
            | MEASURING
            | SUMMING,
            dtype=torch.float32,
            clients=[VICTIM],
            presence=AvailableClients(),
            classes=len(CLASS_NAMES),
        )
        assert options.trust.ca is not None
        server = ServerOptions.from_folder(options.trust.ca.parent.parent / "server", environment={})
        self.server = Aggregator(run, protection=Protection(server))
        self._lives, self._round = 0, 0
        self._first, self._incarnations = text, packed.parent / "unused"
        if options.policy is not None:
            self._incarnations = options.policy.parent / "incarnations"
            self._incarnations.write_text("a0 ")
        self.address = self.server.start("127.0.0.1:0")
        self.start_worker()

    def _parts(self, experiment: dict[str, Any]) -> tuple[assemble.RunContext, str]:
        parsed = parse_experiment(yaml.safe_dump(experiment))
        known = Normalization((0.0,) * 9, (1.0,) * 9)
        manifest = own_manifest(parsed.data.own, self._packed.entries, parsed.seed, known)  # type: ignore[union-attr]
        parts = assemble.make_parts(parsed, manifest)
        return parts, welcome(parts)

    def start_worker(self) -> None:
        self.error: BaseException | None = None
        self._stop = threading.Event()
        worker = Worker(self.address, "w", self._options, self.record)

        def run() -> None:
            try:
                worker.serve(self._stop)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def stop_worker(self) -> None:
        self._stop.set()
        self._thread.join(120)  # a busy machine takes long to account for privacy
        assert not self._thread.is_alive()

    def joined(self, seconds: float = 30.0) -> bool:
        """Wait until the worker is connected; return whether it is."""
        return waited(lambda: bool(self.server.workers()), seconds)

    def become(self, experiment: dict[str, Any] | str) -> None:
        """Become another incarnation with this experiment, or with any text as experiment."""
        self._lives += 1
        text = experiment if isinstance(experiment, str) else self._parts(experiment)[1]
        if text == self._first:
            with self._incarnations.open("a") as file:
                file.write(f"a{self._lives} ")
        self.server.start_new_session(f"a{self._lives}", text)
        waited(lambda: not self.server.workers(), 2)
        self.joined(1.5)

    def ask(
        self, message: Message, purpose: str = "train", *, exchange: int = 0, again: bool = False, seconds: float = 1.5
    ) -> Message | Lost:
        """Ask the victim, by default in a new round."""
        self._round += not (exchange or again)
        answers = answer_shapes(find_algorithm("fedavg").messages, self.sizes)
        shapes = {
            **answers,
            Metrics: self.plan.shapes(2),
            AnswerReady: {each.name: (1,) for each in AnswerReady.fields()},
        }
        key = ConversationKey(self._round, 0, 0, purpose)
        if again:  # as if it had never been opened
            self.server.close(key)
        (found,) = self.server.exchange(Call(key, exchange, (0,), (VICTIM,), message, shapes, seconds))
        return found

    def model(self, size: int | None = None) -> torch.Tensor:
        return torch.full((self.sizes["s"] if size is None else size,), 0.01)


def waited(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- policies, each with an experiment that it allows, and with what must not leave -----------------------------------

PER_DAY = 30_000


def _only_sums(found: Wire, folder: Path) -> None:
    assert not {"Update", "Metrics", "InputMoments"} & set(found.names())
    assert "MemberKeys" not in found.names()  # the attacks' cohorts are smaller than 5


def _noisy(found: Wire, folder: Path) -> None:
    """Updates leave only with the noise of the first experiment, and no more than ε = 2 allows."""
    rate = sampled("poisson", _victim_examples(folder), 8, 2.0)
    updates = found.names().count("Update")
    assert updates == 0 or epsilon_of({rate: 2 * updates}, 1e-5) <= 2.0
    noisy = [float(one["delta_theta"].norm()) for one in found.contents("Update") if "delta_theta" in one]
    assert all(norm > 0.05 for norm in noisy), noisy  # two steps of z · C · lr / b on each of some hundred coordinates


def _victim_examples(folder: Path) -> int:
    return int(json.loads((folder / "examples").read_text()))


def _small(found: Wire, folder: Path) -> None:
    assert sum(map(len, found.frames)) <= PER_DAY
    assert all(one["delta_theta"].nbytes <= 4_000 for one in found.contents("Update") if "delta_theta" in one)


def _quiet(found: Wire, folder: Path) -> None:
    assert "InputMoments" not in found.names()
    for each in found.contents("Metrics"):
        for name in ("confusion", "calibration", "uncertainty", "sums"):
            assert not each[name].any(), name
    assert not any(announced.class_counts for hello in found.parts("hello") for announced in hello.announced)
    assert not any(begin.envelope.conversation.purpose.startswith("evaluate/") for begin in found.parts("begin"))


def _approved(found: Wire, folder: Path) -> None:
    """Answers leave only in incarnations with the approved experiment."""
    approved = set((folder / "incarnations").read_text().split())
    assert {begin.envelope.incarnation for begin in found.parts("begin")} <= approved


POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Wire, Path], None]]] = {
    "sums": ({"only_sums": True, "smallest_cohort": 5}, changed(BASE, federation=SUMS), _only_sums),
    "noise": (
        {"privacy": {"noise_multiplier": 1.5, "epsilon": 2.0}, "folder": "kept"},
        changed(BASE, federation=NOISE),
        _noisy,
    ),
    "small": (
        {"largest_model": "4kB", "traffic": {"per_day": PER_DAY, "per_round": "20kB"}, "folder": "kept"},
        BASE,
        _small,
    ),
    "quiet": ({"metrics": ["accuracy"], "personalization": False, "class_counts": False}, BASE, _quiet),
    "asked": ({"approve": "ask", "folder": "kept"}, BASE, _approved),
}


# --- the attacks ------------------------------------------------------------------------------------------------------


def another_purpose(hostile: Hostile, honest: dict[str, Any]) -> None:
    for purpose in ("evaluate", "measure", "x", "Train", ""):
        hostile.ask(SharedModel(hostile.model()), purpose)


def evaluation_as_training(hostile: Hostile, honest: dict[str, Any]) -> None:
    hostile.ask(PersonalizeRequest(hostile.model()), "train")
    hostile.ask(PersonalizeRequest(hostile.model()), "evaluate/3")
    hostile.ask(SharedModel(hostile.model()), "evaluate/3")


def changed_experiment(hostile: Hostile, honest: dict[str, Any]) -> None:
    hostile.become(changed(BASE, algorithm={"local": {"steps": 1, "lr": 1e-9, "batch_size": 1}}))
    hostile.ask(SharedModel(hostile.model()))
    hostile.ask(PersonalizeRequest(hostile.model()), "evaluate")


def reconnects(hostile: Hostile, honest: dict[str, Any]) -> None:
    """Split the traffic over connections, incarnations and restarts of the worker."""
    for turn in range(4):
        for _ in range(6):
            hostile.ask(SharedModel(hostile.model()), seconds=0.5)
        if turn % 2:
            hostile.stop_worker()
            hostile.start_worker()
            hostile.joined(2)
        else:
            hostile.become(honest)


def flood(hostile: Hostile, honest: dict[str, Any]) -> None:
    for _ in range(25):
        hostile.ask(SharedModel(hostile.model()), seconds=0.3)
    for _ in range(5):
        hostile.ask(SharedModel(hostile.model()), again=True, seconds=0.3)


def larger_cohort(hostile: Hostile, honest: dict[str, Any]) -> None:
    """The experiment says five clients, and the sum is over three."""
    hostile.ask(SharedModel(hostile.model()))
    names = json.dumps([VICTIM, "x", "y"]).encode()
    session = SumSession(
        torch.zeros(16, dtype=torch.uint8),
        torch.frombuffer(bytearray(names), dtype=torch.uint8),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(32, dtype=torch.uint8),
    )
    hostile.ask(session, exchange=1)


def less_noise(hostile: Hostile, honest: dict[str, Any]) -> None:
    hostile.become(changed(BASE, federation={"privacy": {**NOISE["privacy"], "noise_multiplier": 1e-6}}))
    hostile.ask(SharedModel(hostile.model()))
    clients = {**NOISE["privacy"], "clip": 1e-9, "of": "clients"}
    uniform = {**BASE["algorithm"], "weighting": "uniform"}
    hostile.become(changed(BASE, federation={"privacy": clients}, algorithm=uniform))
    hostile.ask(SharedModel(hostile.model()))


def other_metrics(hostile: Hostile, honest: dict[str, Any]) -> None:
    hostile.ask(PersonalizeRequest(hostile.model()), "evaluate")
    hostile.become(changed(honest, evaluation={"metrics": ["auroc"]}))
    hostile.ask(PersonalizeRequest(hostile.model()), "evaluate")
    measured = changed(honest)
    del measured["data"]["own"]["normalization"]
    if "privacy" not in measured["federation"]:
        text = json.loads(hostile._parts(measured)[1])
        hostile.become(json.dumps({**text, "normalization": None}))
        hostile.ask(MeasureInputs(torch.tensor([9.0], dtype=torch.float64)), "measure")


def foreign_code(hostile: Hostile, honest: dict[str, Any]) -> None:
    text = json.loads(hostile._parts(honest)[1])
    shared = json.loads(text["experiment"])
    shared["model"] = {"name": "module", "factory": "os:getcwd"}
    hostile.become(json.dumps({**text, "experiment": json.dumps(shared)}))
    hostile.ask(SharedModel(hostile.model()))


def weaker_graph(hostile: Hostile, honest: dict[str, Any]) -> None:
    for weak in ({"signatures": "none"}, {"signatures": "keys", "neighbours": 2}):
        secure = {"secure_aggregation": {"examples": 1000, **weak}, "min_clients": 5}
        hostile.become(changed(BASE, federation=secure))
        hostile.ask(SharedModel(hostile.model()))


def larger_model(hostile: Hostile, honest: dict[str, Any]) -> None:
    hostile.ask(SharedModel(hostile.model(100_000)))
    hostile.become(changed(honest, model={"hidden": [2000]}))
    hostile.ask(SharedModel(hostile.model(42_000)))


ATTACKS = [
    another_purpose, evaluation_as_training, changed_experiment, reconnects, flood, larger_cohort, less_noise,
    other_metrics, foreign_code, weaker_graph, larger_model,
]  # fmt: skip

QUICK = [("sums", larger_cohort), ("noise", less_noise), ("small", reconnects), ("quiet", other_metrics)]
QUICK.append(("asked", changed_experiment))
EVERY = [(name, attack) for name in POLICIES for attack in ATTACKS]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ClientOptions:
    """Return a member's signing key and certificate; the aggregator's certificate lies in a folder beside them."""
    above = tmp_path_factory.mktemp("credentials")
    make_ca(above / "ca")
    folder = make_certificate("member", above, above / "ca").certificate.parent
    make_certificate("server", above, above / "ca", hosts=["127.0.0.1"])
    printed = fedloom("token", "signing-key", VICTIM, "--out", folder / "signing.key")
    lines = [line for line in printed.splitlines() if line.startswith("speaker-")]
    (folder / "signing-keys.txt").write_text("\n".join(lines) + "\n")
    return ClientOptions.from_folder(folder, environment={})


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """Record every frame of workers, from the Hello on."""
    from fedloom.transport import worker_streams

    found, take, parse = Wire(), Receiver.take, worker_streams.parse_frame
    monkeypatch.setattr(Receiver, "take", lambda self, link, data: found.frames.append(data) or take(self, link, data))
    monkeypatch.setattr(
        worker_streams, "parse_frame", lambda kind, data: found.frames.append(data) or parse(kind, data)
    )
    monkeypatch.setattr(guard, "RETRY_S", 0.2)
    return found


def hostile_to(
    name: str, folder: Path, found: Wire, members: Path, keys: ClientOptions
) -> tuple[Hostile, dict[str, Any]]:
    """Return a hostile aggregator that begins with an experiment which the policy of this name allows."""
    policy, experiment, _ = POLICIES[name]
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    packed = members / "s0"
    (folder / "examples").write_text(json.dumps(OwnClients.open([packed], []).cards[VICTIM].train))
    options = WorkerOptions(packed=(packed,), policy=folder / "policy.yaml", reconnect_s=60.0, trust=replace(keys))
    hostile = Hostile(experiment, packed, options)
    if name == "asked":
        approvals = Approvals(folder / "kept")
        assert waited(lambda: len(approvals.known()) == 1, 60)
        approvals.decide(None, "approved")
        assert waited(lambda: len(found.parts("hello")) > 1, 60)  # it left, and comes again
    assert hostile.joined()
    time.sleep(0.5)  # a stream that another one replaces ends within this time
    assert hostile.joined()
    return hostile, experiment


def check(
    name: str, attack: Callable[..., None], folder: Path, found: Wire, members: Path, keys: ClientOptions
) -> None:
    hostile, experiment = hostile_to(name, folder, found, members, keys)
    try:
        attack(hostile, experiment)
        POLICIES[name][2](found, folder)
        told = [reason for reason in found.reasons() if "policy.yaml" in reason]
        assert all(mentions(reason, "policy.yaml:") for reason in told)
    finally:
        hostile.stop_worker()
        hostile.server.stop()


@pytest.mark.parametrize(("name", "attack"), QUICK)
def test_nothing_leaves_that_a_policy_forbids(
    name: str, attack: Callable[..., None], tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    check(name, attack, tmp_path, recorded, members, keys)
    assert any("policy.yaml:" in reason for reason in recorded.reasons()) or name == "quiet"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attack"), [pair for pair in EVERY if pair not in QUICK])
def test_nothing_leaves_under_any_other_attack(
    name: str, attack: Callable[..., None], tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    check(name, attack, tmp_path, recorded, members, keys)


@pytest.mark.parametrize("name", POLICIES)
def test_an_honest_question_is_answered(
    name: str, tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    """Otherwise the tests above would prove nothing."""
    hostile, _ = hostile_to(name, tmp_path, recorded, members, keys)
    try:
        found = hostile.ask(SharedModel(hostile.model()), seconds=120)
        assert not isinstance(found, Lost), found
        assert ("Update" in recorded.names()) == (name != "sums")
    finally:
        hostile.stop_worker()
        hostile.server.stop()


def test_withheld_measurements_are_told_to_the_aggregator_after_each_joining(
    tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    hostile, experiment = hostile_to("quiet", tmp_path, recorded, members, keys)
    try:
        for _ in range(2):
            assert waited(lambda: any(each.withheld for each in hostile.server.activity().workers), 60)
            (worker,) = hostile.server.activity().workers
            assert mentions(worker.withheld, "policy.yaml:", "metrics", "confusion", "calibration", "uncertainty")
            assert "counts" not in worker.withheld
            hostile.become(experiment)
    finally:
        hostile.stop_worker()
        hostile.server.stop()


def test_a_declined_worker_is_in_the_status_and_joins_once_the_experiment_fits(
    tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    hostile, experiment = hostile_to("sums", tmp_path, recorded, members, keys)
    try:
        hostile.become(BASE)
        assert waited(lambda: "w" in hostile.server.activity().declined, 60)
        assert mentions(hostile.server.activity().declined["w"], "policy.yaml:1: only_sums")
        hostile.become(experiment)
        assert waited(lambda: bool(hostile.server.workers()) and not hostile.server.activity().declined, 60)
        assert hostile.error is None
    finally:
        hostile.stop_worker()
        hostile.server.stop()


def test_a_model_larger_than_memory_is_declined_before_it_is_built(
    tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    hostile, experiment = hostile_to("small", tmp_path, recorded, members, keys)
    try:
        text = json.loads(hostile._parts(experiment)[1])
        shared = json.loads(text["experiment"])
        shared["model"]["hidden"] = [10**6, 10**6]  # four terabytes
        hostile.become(json.dumps({**text, "experiment": json.dumps(shared)}))
        assert waited(lambda: bool(recorded.parts("declined")), 60)
        assert mentions(recorded.parts("declined")[-1].reason, "policy.yaml:", "largest_model", 4000088000044)
    finally:
        hostile.stop_worker()
        hostile.server.stop()


def test_a_refused_experiment_disconnects_and_an_approved_one_connects_again(
    tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    hostile, _ = hostile_to("asked", tmp_path, recorded, members, keys)
    try:
        approvals = Approvals(tmp_path / "kept")
        (known,) = approvals.known()
        text = json.dumps(known.experiment, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        assert known.digest == experiment_digest(text)
        approvals.decide(known.digest, "refused")
        assert waited(lambda: not hostile.server.workers(), 60)
        approvals.decide(known.digest, "approved")
        assert hostile.joined()
        assert not isinstance(hostile.ask(SharedModel(hostile.model()), seconds=120), Lost)
    finally:
        hostile.stop_worker()
        hostile.server.stop()


def test_without_a_file_only_sums_ends_the_worker(
    tmp_path: Path, recorded: Wire, members: Path, keys: ClientOptions
) -> None:
    options = WorkerOptions(packed=(members / "s0",), only_sums=True, trust=keys)
    hostile = Hostile(BASE, members / "s0", options)
    try:
        assert waited(lambda: hostile.error is not None, 60)
        assert isinstance(hostile.error, RefusedError)
        assert mentions(str(hostile.error), "only_sums")
        assert mentions(recorded.parts("declined")[0].reason, "secure aggregation")
    finally:
        hostile.server.stop()
