"""Models on request: over real sockets, equal to those of a run's folder to the bit, and robust against any client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import queue
import re
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from facts import refusing, telling, tells
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from ports import free_address, free_port
from run_processes import WAIT_S, started
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from served_runs import served
from torch import Tensor
from vowel_runs import on_vowels

import fedloom
from fedloom import experiment as experiments
from fedloom.algorithms.base import available
from fedloom.algorithms.fedavg import Update
from fedloom.algorithms.pefll import Descriptor, DescriptorRequest, PeFLLTrainRequest, PersonalizedModel
from fedloom.core import digests
from fedloom.data.newcomer import Newcomer
from fedloom.data.pack import PackSettings, pack
from fedloom.data.problem import Problem
from fedloom.data.spec import DataSpec, Normalization
from fedloom.engine.assemble import make_parts
from fedloom.engine.distributed import ServingSettings
from fedloom.engine.distributed import serving as aggregator_serving
from fedloom.engine.options import ServingOptions
from fedloom.errors import DataError, ExperimentError, QuorumError, RefusedError, StorageError
from fedloom.ledger.ledger import PrivacyAccountant
from fedloom.privacy.gaussian_mechanism import compose, gaussian_epsilon, noise_multiplier
from fedloom.privacy.spent import PrivacyGuarantee
from fedloom.runs.folder import RunFolder
from fedloom.security.audit import Audit
from fedloom.security.options import Protection, ServerOptions
from fedloom.security.tokens import add_token
from fedloom.serving.commands import personalize_command as personalize
from fedloom.serving.personal import RequestingClient
from fedloom.serving.personalization import PersonalizationRequest
from fedloom.serving.serve import DurableRounds, model_service
from fedloom.transport.codec import Cutter, encode
from fedloom.transport.frames import pack_parts, parse_frame, seal_frame, serialize
from fedloom.transport.newcomer import Models
from fedloom.transport.personalization import ModelServerSettings
from fedloom.transport.stream import DESCRIBE, MODELS, PERSONALIZE, RETRY, message_frames
from fedloom.transport.wire import personalization_pb2 as wire

PEFLL = {"name": "pefll", "local": {"steps": 1}, "embedding": {"network": "mlp"}, "descriptor": {"batch_size": 4}}
FLOWDUP = {"name": "flowdup", "local": {"steps": 1}, "embedding": {"network": "mlp", "labels": False}}
METHODS: dict[str, dict[str, Any]] = {
    "pefll": PEFLL,
    "pefll without labels": {**PEFLL, "embedding": {"network": "mlp", "labels": False}},
    "pefll in a subspace": {**PEFLL, "hypernetwork": {"subspace": {"size": 20}}},
    "fedavg": {"name": "fedavg", "local": {"steps": 1}, "personalize_steps": 3},
    "flowdup without labels": FLOWDUP,
    "flowdup": {**FLOWDUP, "personalize_steps": 2},
    "pfedbayes": {"name": "pfedbayes", "steps": 1, "samples": 1, "draws": 2, "personalize_steps": 2},
    "knn-per": {"name": "knn-per", "local": {"steps": 1}},
    "pfedgp": {"name": "pfedgp", "chains": 2, "chains_predict": 3},
    "pfedhn": {"name": "pfedhn", "local": {"steps": 1}, "personalize_exchanges": 2},
    "wga": {"name": "wga", "batch_size": 4, "steps_per_round": 1, "personalize_steps": 1},
}

for _other in available():  # the others share their code with these, and are in the second tier
    METHODS.setdefault(_other, {"name": _other, **({} if _other == "pfedme" else {"local": {"steps": 1}})})
METHODS["fedsa-lora"]["local_parameters"] = ["*bias"]
FIRST_TIER = 10


def examples(seed: int, n: int = 20) -> tuple[Tensor, Tensor]:
    """Return a new client's vowels."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, 9, generator=random), torch.randint(11, (n,), generator=random)


def normalized() -> torch.nn.Module:
    """Return a network with a normalization layer for vowels."""
    return torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 11))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a method once."""

    @functools.cache
    def train(method: str) -> Path:
        folder = tmp_path_factory.mktemp("served")
        on_vowels(folder, METHODS[method], rounds=int(method != "local")).run()
        return folder / "run"

    return train


@pytest.fixture(scope="module")
def run(trained: Callable[[str], Path]) -> Path:
    return trained("pefll")


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if i >= FIRST_TIER else []) for i, name in enumerate(METHODS)],
)
def test_served_models_equal_the_runs(
    trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("FEDLOOM_FACTORIES", "vowel_runs:normalized")
    run, (x, y) = trained(method), examples(3)
    labels = None if "without" in method else y
    with served(run) as at:
        model = fedloom.personalize(at, x, labels, client="eve")
    local = fedloom.personalize(str(run), x, labels, client="eve")
    assert same(model, local)
    assert torch.equal(model(x), local(x))
    assert torch.equal(model(x), local(x.numpy()))  # as in personalize
    assert torch.equal(model(x), local(x.tolist()))
    assert model.card == local.card
    assert model.card.round == int(method != "local")
    assert torch.allclose(model(x).sum(1), torch.ones(20))
    assert len(model.classes) == 11


def test_concurrent_clients_share_tiles_and_get_the_same_models_as_alone(run: Path) -> None:
    async def all_of(at: str) -> list[Any]:
        return await asyncio.gather(*(fedloom.personalize_async(at, *examples(i), client=f"c{i}") for i in range(21)))

    with served(run, settings=ModelServerSettings(linger_s=0.05)) as at:
        models = asyncio.run(all_of(at))
    for i, model in enumerate(models):
        alone = fedloom.personalize(str(run), *examples(i), client=f"c{i}")
        assert same(model, alone)


def test_more_conversations_than_streams_all_complete(run: Path) -> None:
    """Repeat a call that was refused only for that reason, whichever of its frames was refused."""
    words = {kind.__name__: kind for kind in (DescriptorRequest, Descriptor, PersonalizedModel)}

    def speak(round: int, exchange: int, message: Any) -> Descriptor | None:
        return Descriptor(torch.zeros(1, Raw.size)) if exchange == 0 else None

    async def all_of(at: str) -> int:
        models = Models(at)
        about = (await models.describe(WAIT_S)).about

        async def some() -> None:
            for _ in range(2):
                await models.converse(about, "c", words, speak)

        try:
            await models.converse(about, "c", words, speak)  # later ones answer in their first frame
            await asyncio.gather(*(some() for _ in range(250)))
            return (await models.describe(WAIT_S)).handed_out
        finally:
            await models.close()

    with served(run) as at:
        assert asyncio.run(all_of(at)) >= 501


def test_a_newer_round_is_loaded_and_open_conversations_end_with_theirs(tmp_path: Path) -> None:
    on_vowels(tmp_path, PEFLL).run()
    run, (x, y) = tmp_path / "run", examples(1)
    first = fedloom.personalize(str(run), x, y)
    with served(run, follow=True) as at:
        with Raw(at) as begun:
            begun.ask()
            opening, _ = begun.read()
            resumed = on_vowels(tmp_path, PEFLL, rounds=2)
            resumed.resume()
            resumed.run()

            async def until(round: int) -> int:
                models = Models(at)
                try:
                    async with asyncio.timeout(WAIT_S):
                        while (found := (await models.describe(WAIT_S)).round) != round:
                            await asyncio.sleep(0.02)
                finally:
                    await models.close()
                return found

            assert asyncio.run(until(2)) == 2
            begun.say(Descriptor(torch.zeros(1, begun.size)))
            assert begun.read()[0].served == opening.served
            assert opening.served.round == 1
        model = fedloom.personalize(at, x, y)
    assert model.card.round == 2
    assert not same(model, first)
    assert same(model, fedloom.personalize(str(run), x, y))
    assert same(first, fedloom.personalize(str(run), x, y, checkpoint=1))


class Raw:
    """A client that can send anything."""

    size = 4  # 1 + 15 // 4, the vowels' clients

    def __init__(self, address: str, **ask: Any) -> None:
        self._channel = grpc.insecure_channel(address)
        self._out: Any = None
        self._about = {"client": "raw", "package": fedloom.__version__, "algorithm": "pefll", "algorithm_version": 1}
        self._about |= ask

    def __enter__(self) -> Raw:
        self._out = queue.Queue()
        call = self._channel.stream_stream(f"/{MODELS}/{PERSONALIZE}")
        self.call = call(iter(self._out.get, None), timeout=WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._out.put(None)
        self.call.cancel()
        self._channel.close()

    def send(self, data: bytes) -> None:
        self._out.put(data)

    def ask(self, **more: Any) -> None:
        self.send(seal_frame(serialize(wire.NewcomerPart(ask=wire.Ask(**self._about, **more)))))

    def say(self, message: Any) -> None:
        for frame in message_frames(Cutter(wire.NewcomerPart), encode(message)):
            self.send(frame)

    def read(self) -> tuple[wire.Header, str]:
        """Return the header of the next message, which is one frame, and its class."""
        header, begin, *_ = parse_frame(wire.ModelFrame, next(self.call)).parts
        return header.header, begin.begin.envelope.message

    def refusal(self) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        with pytest.raises(grpc.RpcError) as caught:
            self.read()
        error: Any = caught.value
        return error.code(), error.details(), dict(error.trailing_metadata() or ())


def answer_parts(v: torch.Tensor) -> list[wire.NewcomerPart]:
    """Return the parts of a valid answer: Begin, Chunk, End."""
    (frame,) = message_frames(Cutter(wire.NewcomerPart), encode(Descriptor(v)))
    return list(parse_frame(wire.NewcomerFrame, frame).parts)


def poisoned(v: torch.Tensor) -> Iterator[list[wire.NewcomerPart]]:
    """Return answers that are sealed, and invalid inside."""

    def changed(i: int, change: Any) -> list[wire.NewcomerPart]:
        parts = answer_parts(v)
        change(parts[i])
        return parts

    def spec(part: Any) -> Any:
        return part.begin.envelope.tensors[0]

    yield changed(0, lambda part: setattr(part.begin, "total_bytes", 1 << 60))
    yield changed(0, lambda part: spec(part).shape.extend([1 << 62] * 7))
    yield changed(0, lambda part: spec(part).shape.extend([1 << 62] * 50_000))
    yield changed(0, lambda part: setattr(spec(part), "name", "w"))
    yield changed(0, lambda part: setattr(spec(part), "dtype", 77))
    yield changed(0, lambda part: setattr(spec(part), "quantity", 5))
    yield changed(0, lambda part: setattr(spec(part), "per_client", False))
    yield changed(0, lambda part: part.begin.envelope.tensors.add())
    yield changed(1, lambda part: setattr(part.chunk, "transfer", 2))
    yield changed(1, lambda part: setattr(part.chunk, "offset", 1))
    yield changed(1, lambda part: setattr(part.chunk, "data", b""))
    yield changed(1, lambda part: setattr(part.chunk, "data", part.chunk.data + b"x"))
    yield changed(1, lambda part: setattr(part.chunk, "data", part.chunk.data[:-1]))
    yield changed(2, lambda part: setattr(part.end, "transfer", 2))
    begin, chunk, end = answer_parts(v)
    yield [chunk, begin, end]
    yield [begin, begin, chunk, end]
    yield [begin, end, chunk]
    yield [begin, chunk, chunk, end]
    yield [wire.NewcomerPart(ask=wire.Ask(client="again"))]
    yield [end] * 200_000


@pytest.mark.parametrize(
    ("protocols", "described"),
    [
        ((0, 0), (9, "0.1.0")),  # of release 0.1.0, which compares both with its own
        ((9, 0), (9, "0.1.0")),
        ((10, 9), (10, fedloom.__version__)),
        ((11, 10), (10, fedloom.__version__)),
        ((12, 11), (10, fedloom.__version__)),  # none in common: the client sees what this server has
        ((8, 8), (10, fedloom.__version__)),
        ((9, 2**32 - 1), (10, fedloom.__version__)),
        ((2**32 - 1, 1), (10, fedloom.__version__)),
    ],
)
def test_a_server_describes_itself_in_the_newest_protocol_in_common(
    run: Path, protocols: tuple[int, int], described: tuple[int, str]
) -> None:
    with served(run) as at, grpc.insecure_channel(at) as channel:
        call = channel.unary_unary(f"/{MODELS}/{DESCRIBE}", response_deserializer=wire.Described.FromString)
        asked = wire.DescribeRequest(protocol=protocols[0], oldest_protocol=protocols[1])
        found = call(asked.SerializeToString(), timeout=WAIT_S)
        assert (found.protocol, found.package) == described


@pytest.mark.parametrize(
    ("protocol", "advice"), [(0, "upgrade"), (8, "upgrade"), (11, "install"), (2**32 - 1, "install")]
)
def test_a_client_rejects_a_server_without_a_protocol_in_common(protocol: int, advice: str) -> None:
    def describe(request: bytes, context: Any) -> bytes:
        return wire.Described(protocol=protocol, package="7.8\x1b").SerializeToString()

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {DESCRIBE: grpc.unary_unary_rpc_method_handler(describe)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(MODELS, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    async def ask() -> None:
        models = Models(address)
        try:
            await models.describe(WAIT_S)
        finally:
            await models.close()

    with pytest.raises(RefusedError) as refused:
        asyncio.run(ask())
    server.stop(0)
    assert tells(str(refused.value), "7.8\\x1b", protocol, "9 to 10")
    assert advice in (refused.value.hint or "")


def test_a_client_with_invalid_messages_does_not_affect_the_next(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    v = torch.zeros(1, Raw.size)
    answers: list[tuple[Any, str]] = [
        (Descriptor(v * float("nan")), "not finite"),
        (Descriptor(v + 1e30), "beyond ±1e"),
        (Descriptor(torch.zeros(1, 99)), "at most"),
        (Descriptor(torch.zeros(1, 3)), "expected [1, 4]"),
        (Descriptor(torch.zeros(2, 2)), "expected [1, 4]"),
        (Descriptor(v.double()), "expected torch.float32"),
        (PersonalizedModel(v), "Descriptor"),
    ]
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    with served(run) as at:
        for message, output in answers:
            with Raw(at) as raw:
                raw.ask()
                raw.read()
                raw.say(message)
                code, details, _ = raw.refusal()
                assert (code, output in details) == (invalid, True), details
        for ask, code, output in (
            ({"algorithm_version": 9}, grpc.StatusCode.FAILED_PRECONDITION, "version 9"),
            ({"round": 7}, grpc.StatusCode.NOT_FOUND, "7"),
            ({"client": "../x"}, invalid, "id"),
        ):
            with Raw(at, **ask) as raw:
                raw.ask()
                found, details, _ = raw.refusal()
                assert (found, output in details) == (code, True), details
        for garbage in (b"\xff\xff", b"", *map(seal_frame, ([], [b"\xff\xff"], serialize(answer_parts(v)[0])))):
            with Raw(at) as raw:
                raw.send(garbage)
                assert raw.refusal()[0] is invalid
        with Raw(at) as raw:  # of protocol 4, whose frames have no checksum
            raw.send(b"\x0a\x03\x0a\x01a")
            code, details, _ = raw.refusal()
            assert (code, "install the same version" in details) == (invalid, True)
        with Raw(at) as raw:  # announced and not sent; then disconnected
            raw.ask()
            raw.read()
            raw.send(seal_frame(serialize(answer_parts(v)[0])))
        damaged = bytearray(next(pack_parts(map(serialize, answer_parts(v)))))
        damaged[-1] ^= 1
        for data in (bytes(damaged), *(next(pack_parts(map(serialize, parts))) for parts in poisoned(v))):
            with Raw(at) as raw:
                raw.ask()
                raw.read()
                raw.send(data)
                assert raw.refusal()[0] is invalid
        assert fedloom.personalize(at, *examples(1)).card.round == 1
    # gRPC's poller reports the closed event loops of earlier tests in this process
    assert not [r for r in caplog.records if r.exc_info and "PollerCompletionQueue" not in r.getMessage()]


def test_a_full_queue_returns_a_retry_time(run: Path) -> None:
    settings = ModelServerSettings(linger_s=WAIT_S, queue=1, drain_s=0)
    v = torch.zeros(1, Raw.size)
    with served(run, settings=settings) as at:
        with Raw(at) as first, Raw(at) as second:
            first.ask()
            first.read()
            first.say(Descriptor(v))
            until_waiting(at, 1)
            second.ask()
            second.read()
            second.say(Descriptor(v))
            code, details, metadata = second.refusal()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(metadata[RETRY]) > 0
            assert "1 client" in details
        until_waiting(at, 0)
        with pytest.raises(QuorumError, match=r"no model"):
            fedloom.personalize(at, *examples(1), timeout_s=0.5)


def test_a_client_with_unusable_values_does_not_affect_its_tile(run: Path) -> None:
    with served(run, settings=ModelServerSettings(linger_s=1.0)) as at, Raw(at) as nan, Raw(at) as far:
        for raw, value in ((nan, float("nan")), (far, 1e30)):
            raw.ask()
            raw.read()
            raw.say(Descriptor(torch.full((1, Raw.size), value)))
        until_waiting(at, 2)
        model = fedloom.personalize(at, *examples(1), client="c1")
        assert {raw.refusal()[0] for raw in (nan, far)} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert same(model, fedloom.personalize(str(run), *examples(1), client="c1"))


def until_gone(address: str) -> None:
    """Request models until a server stops accepting."""
    with contextlib.suppress(QuorumError):
        while True:
            fedloom.personalize(address, *examples(1), timeout_s=1)


def until_waiting(address: str, count: int) -> None:
    """Wait until so many clients wait for a tile; a disconnected one leaves the queue at the next check."""

    async def wait() -> None:
        models = Models(address)
        try:
            async with asyncio.timeout(WAIT_S):
                while (await models.describe(WAIT_S)).waiting != count:
                    await asyncio.sleep(0.01)
        finally:
            await models.close()

    asyncio.run(wait())


def test_a_client_that_exceeds_the_time_limit_is_notified(run: Path) -> None:
    with served(run, settings=ModelServerSettings(deadline_s=0.05)) as at, Raw(at) as raw:
        raw.ask()
        raw.read()
        code, details, _ = raw.refusal()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.05 s" in details


def test_a_silent_client_only_delays_its_tile(trained: Callable[[str], Path]) -> None:
    """pFedHN's conversation has several exchanges, which the clients of a tile take part in together."""
    run, (x, y) = trained("pfedhn"), examples(1)
    d = sum(tensor.numel() for tensor in fedloom.personalize(str(run), x, y).state_dict().values())
    number = torch.zeros(1, 1, dtype=torch.float64)
    with (
        served(run, settings=ModelServerSettings(linger_s=1.0, deadline_s=2.0)) as at,
        Raw(at, algorithm="pfedhn") as raw,
    ):
        raw.ask()
        raw.read()
        raw.say(Update(torch.zeros(1, d), number, number))
        until_waiting(at, 1)
        model = fedloom.personalize(at, x, y)
        assert raw.read()[1] == "TrialModel"
        assert raw.refusal()[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert same(model, fedloom.personalize(str(run), x, y))


@pytest.mark.parametrize(
    ("bad", "output"),
    [
        ({"x": torch.zeros(5, 8)}, r"x .*\[5, 8\]; .*\[n, 9\]"),
        ({"x": torch.zeros(5, 9, dtype=torch.complex64)}, "x.*complex64"),
        ({"x": torch.arange(45).reshape(5, 9) + 2**30}, r"32-bit .*x\[:, 0\]"),
        ({"x": torch.full((5, 9), float("nan"))}, r"finite.*x\[0, 0\]: nan"),
        ({"x": torch.zeros(1, 1).expand(10_000_000, 9)}, "10,000,000 examples; .*1,000,000"),
        ({"x": torch.zeros(0, 9)}, "x has 0 examples"),
        ({"x": "abc"}, r"x is of shape \[\]"),
        ({"y": torch.full((5,), 11)}, r"5 errors.*\n.*0 to 10.* y\[0\]: 11"),
        ({"y": torch.zeros(4)}, r"y is of shape \[4\]"),
        ({"y": torch.full((5,), 0.7)}, r"5 errors.*\n.*0 to 10.* y\[0\]: '0.69"),
        ({"y": [[1], [2, 3]]}, "y: "),
        ({"y": ["had", "hid", "had", "umlaut", "hid"]}, r"1 error.*\n.*hid, hId.* y\[3\]: 'umlaut'"),
        ({"y": None}, "has no labels"),
        ({"client": "a b"}, "client 'a b'"),
        ({"checkpoint": 7}, "no checkpoint of round 7|found 7; allowed: 1"),
        ({"epsilon": 0.0, "clip": 1.0}, r"epsilon must be above 0.*\(got 0\.0\)"),
        ({"epsilon": -1.0, "clip": 1.0}, r"epsilon must .*\(got -1\.0\)"),
        ({"epsilon": math.nan, "clip": 1.0}, r"epsilon must .*\(got nan\)"),
        ({"epsilon": 1.0, "clip": 1.0, "delta": 0.0}, r"delta must be above 0 and at most 0\.01 \(got 0\)"),
        ({"epsilon": 1.0, "clip": 1.0, "delta": 0.9}, r"delta must .*at most 0\.01 \(got 0\.9\)"),
        ({"epsilon": 1.0, "clip": 0.0}, r"clip must .*above 0 \(got 0\.0\)"),
        ({"epsilon": 1.0, "clip": math.inf}, r"clip must .*\(got inf\)"),
        ({"epsilon": 1.0}, "clip must be given, because the run was trained without"),
        ({"delta": 1e-5}, "delta needs epsilon"),
        ({"clip": 1.0}, "clip needs epsilon"),
    ],
)
def test_invalid_data_and_privacy_give_a_one_sentence_error(run: Path, bad: dict[str, Any], output: str) -> None:
    private = {"epsilon", "delta", "clip"} & bad.keys()
    with pytest.raises(ExperimentError if private else DataError, match=output):
        fedloom.personalize(str(run), **{"x": torch.zeros(5, 9), "y": torch.zeros(5, dtype=torch.int64), **bad})


def test_labels_may_be_names_of_classes(run: Path) -> None:
    x, y = examples(1)
    model = fedloom.personalize(str(run), x, y)
    names = [model.classes[label] for label in y]
    for labels in (names, np.array(names), y.numpy(), y.tolist()):
        assert same(fedloom.personalize(str(run), x, labels), model)


@pytest.mark.parametrize(
    ("x", "output"),
    [
        (torch.full((2, 1, 4, 4), 256), "not an integer from 0 to 255, in 32 places: x[0, 0, 0, 0]: 256"),
        (torch.full((2, 1, 4, 4), -1), "not an integer from 0 to 255, in 32 places: x[0, 0, 0, 0]: -1"),
        (torch.zeros(2, 1, 4, 4), "x is float32; pixels must be of an integer type, from 0 to 255"),
        (torch.zeros(2, 4, 5, dtype=torch.uint8), "x is of shape [2, 1, 4, 5]; it must be [n, 1, 4, 4]"),
    ],
)
def test_pixels_of_another_range_or_kind_give_a_one_sentence_error(x: Tensor, output: str) -> None:
    wanted = Problem(
        "photos", DataSpec.single("pixels", (1, 4, 4), ("a", "b"), Normalization((0.5,), (0.5,))), clients=1
    )
    with pytest.raises(DataError, match=re.escape(output)):
        Newcomer.from_arrays("eve", x, None, wanted)


@pytest.mark.parametrize(
    ("features", "other", "output"),
    [(9, "umlaut", ["class", "'umlaut'", "hid, hId"]), (2, "hid", ["input_shape", "[2]", "[9]"])],
)
def test_a_folder_with_more_classes_or_another_shape_gives_a_one_sentence_error(
    run: Path, tmp_path: Path, features: int, other: str, output: list[str]
) -> None:
    rows = [",".join([*(str(i + j) for j in range(features)), ("had", other)[i % 2]]) for i in range(24)]
    header = ",".join([*(f"f{j}" for j in range(features)), "label"])
    (tmp_path / "eve.csv").write_text("\n".join([header, *rows]) + "\n")
    pack(tmp_path / "eve.csv", tmp_path / "eve", PackSettings())
    with served(run) as at:
        for where in (at, str(run)):
            with refusing(DataError, tmp_path / "eve", *output):
                fedloom.personalize(where, data=tmp_path / "eve")
        assert fedloom.personalize(at, *examples(1)).card.round == 1


KNOWN_ONLY = """
import copy
from fedloom.algorithms.fedavg import FEDAVG
from fedloom.errors import DataError


def server(*given):
    half = FEDAVG.server(*given)
    shared = half.personalize

    def personalize(cohort):
        for client in cohort.clients:
            if client not in half.setup.roster:
                raise DataError(f"{client} was not trained with")
        return shared(cohort)

    half.personalize = personalize
    return half


METHOD = copy.copy(FEDAVG)
METHOD.name, METHOD.server = "known-only", server
"""


@pytest.fixture
def known_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a third-party method with models only for the clients that it was trained with."""
    about = tmp_path / "site" / "known_only-0.1.dist-info"
    about.mkdir(parents=True)
    (tmp_path / "site" / "known_only.py").write_text(KNOWN_ONLY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: known-only\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[fedloom.algorithms]\nknown-only = known_only:METHOD\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return {"name": "known-only", "local": {"steps": 1}}


def test_a_method_without_models_for_new_clients_trains_on(tmp_path: Path, known_only: dict[str, Any]) -> None:
    loop = on_vowels(tmp_path, known_only)
    run, (x, y) = tmp_path / "run", examples(1)
    e, audit = experiments.load_experiment(run / "experiment.yaml"), Audit()
    parts, models = make_parts(e, loop.manifest), model_service(loop.folder, audit, e.runtime.threads)
    settings = ServingSettings(ServingOptions(listen="127.0.0.1:0", wait_s=0.1), Protection(), audit, "one")
    with aggregator_serving(parts, settings, print, models=models) as at:
        evaluation = loop.run()
        assert loop.round == 1
        assert not evaluation.present[~evaluation.seen].any()
        for _ in range(2):
            with refusing(DataError, at.address, "known-only", "no model", "unknown client", "was not trained with"):
                fedloom.personalize(at.address, x, y, timeout_s=WAIT_S)
    for refused in (lambda: served(run).__enter__(), lambda: fedloom.personalize(str(run), x, y)):
        with refusing(ExperimentError, "known-only", "no model", "unknown client", "was not trained with"):
            refused()


def test_missing_runs_and_folders_and_unwanted_labels(tmp_path: Path, trained: Callable[[str], Path]) -> None:
    for where in ("runn", "runs/none", "C:/run"):  # no addresses
        with pytest.raises(DataError, match=f"^{where} .*HOST:PORT"):
            fedloom.personalize(where, *examples(1))
    with pytest.raises(DataError):  # a QuorumError without a server
        fedloom.personalize("127.0.0.1:1", data=tmp_path / "nowhere", timeout_s=5)
    with pytest.raises(DataError, match="y must be left out"):
        fedloom.personalize(str(trained("pefll without labels")), *examples(1))


def promised(model: Any) -> tuple[float, float, float, int]:
    promise = model.card.privacy
    return promise.epsilon, promise.delta, promise.clip, promise.examples


def test_the_server_gets_a_private_descriptor_on_request(run: Path, tmp_path: Path) -> None:
    x, y = examples(1)
    how: dict[str, Any] = {"client": "eve", "epsilon": 1.0, "clip": 0.5}
    with served(run) as at:
        plain, private, again = (fedloom.personalize(at, x, y, **more) for more in ({"client": "eve"}, how, how))
        assert plain.card.privacy is None
        assert promised(private) == (pytest.approx(1.0), 1e-5, 0.5, 20)
        assert private.card.privacy.noise_multiplier == pytest.approx(3.7306, rel=1e-4)  # type: ignore[union-attr]
        assert not same(private, again)  # the noise depends only on the client's own system
        off = fedloom.personalize(at, x, y, client="eve", epsilon=math.inf)
        assert same(off, plain)
        assert off.card == plain.card
        assert promised(fedloom.personalize(at, x[:1], y[:1], **how))[3] == 1
    local = fedloom.personalize(str(run), x, y, **how, delta=1e-7)
    assert promised(local) == (pytest.approx(1.0), 1e-7, 0.5, 20)
    local.save(tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        reported = json.loads(file.metadata()["fedloom"])["privacy"]
    assert (reported["epsilon"], reported["mechanism"], reported["neighbours"]) == (
        pytest.approx(1.0),
        "gaussian",
        "replace one",
    )


def test_a_ledger_adds_up_requests_and_enforces_the_budget(run: Path, tmp_path: Path) -> None:
    (x, y), file = examples(1), tmp_path / "ledger.jsonl"
    how: dict[str, Any] = {"epsilon": 1.0, "clip": 0.5, "ledger": file, "budget": 2.0}
    z = noise_multiplier(1.0, 1e-5)
    with served(run) as at:
        for k, where in enumerate((at, str(run), at), 1):
            reported = fedloom.personalize(where, x, y, **how).card.privacy
            assert (reported.requests, reported.epsilon) == (k, pytest.approx(1.0))
            assert reported.total_epsilon == pytest.approx(gaussian_epsilon(z, 1e-5, k))
        before = file.read_bytes()
        lines = [json.loads(line) for line in before.splitlines()]
        assert [line["version"] for line in lines] == [2] * 4
        assert (lines[0]["delta"], "epsilon" in lines[0]) == (1e-5, False)  # the ledger's delta
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for where in (at, str(run)):
            with pytest.raises(ExperimentError, match=r"budget is 2, .*2\.1.*1e-05.*after 3 "):
                fedloom.personalize(where, x, y, **how)
        assert file.read_bytes() == before
        assert handed_out(at) == 2
        with pytest.raises(ExperimentError, match="budget is 2, "):  # at its own δ the total would be 1.46
            fedloom.personalize(at, x, y, **{**how, "delta": 1e-2})
        more = fedloom.personalize(at, x, y, **{**how, "epsilon": 0.1, "delta": 1e-4}).card.privacy  # of another size
    assert (more.delta, more.total_delta) == (1e-4, 1e-5)
    assert more.total_epsilon == pytest.approx(gaussian_epsilon(compose([z, z, z, noise_multiplier(0.1, 1e-4)]), 1e-5))


@given(st.lists(st.tuples(st.floats(0.05, 3), st.sampled_from([1e-8, 1e-5, 1e-2])), min_size=1, max_size=4))
def test_a_larger_delta_of_one_request_never_lowers_the_total(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[float, float]]
) -> None:
    path, total = tmp_path_factory.mktemp("ledger") / "l", 0.0
    for epsilon, delta in requests:
        reported = PrivacyAccountant(path).charge(
            PrivacyGuarantee(epsilon, delta, 1.0, noise_multiplier(epsilon, delta), 50)
        )
        assert reported.total_delta == requests[0][1]
        assert reported.total_epsilon is not None
        assert reported.total_epsilon > total
        total = reported.total_epsilon
    with pytest.raises(ExperimentError, match="budget is"):
        PrivacyAccountant(path, total).charge(PrivacyGuarantee(0.1, 1e-2, 1.0, noise_multiplier(0.1, 1e-2), 50))


@pytest.mark.parametrize(("delta", "n"), [(None, 100_000), (1e-3, 1000), (0.0099, 102)])
def test_a_meaningless_delta_for_the_number_of_examples_is_rejected(delta: float | None, n: int) -> None:
    with pytest.raises(ExperimentError, match="delta must be below 1/n"):
        PersonalizationRequest("run", epsilon=1.0, delta=delta).check_delta(n)
    PersonalizationRequest("run", epsilon=1.0, delta=delta).check_delta(n // 2)
    PersonalizationRequest("run", epsilon=math.inf, delta=delta).check_delta(n)


def handed_out(address: str) -> int:
    async def ask() -> int:
        models = Models(address)
        try:
            return (await models.describe(WAIT_S)).handed_out
        finally:
            await models.close()

    return asyncio.run(ask())


def test_charges_are_durable_before_the_descriptor_is_sent(run: Path, tmp_path: Path) -> None:
    request = PersonalizationRequest("here", *examples(1), epsilon=1.0, clip=0.5, ledger=tmp_path / "ledger")
    client = RequestingClient.described(request, DurableRounds(RunFolder(run)).about)
    found = DurableRounds(RunFolder(run))(None)
    assert not (tmp_path / "ledger").exists()
    for _ in "ab":  # a broken connection
        client.speak(1, 0, found.opening)
        assert len((tmp_path / "ledger").read_bytes().splitlines()) == 2  # its δ, and the request


def test_a_new_client_does_not_train(run: Path) -> None:
    """A server that lies could ask for an update, which has no noise."""
    client = RequestingClient.described(
        PersonalizationRequest("here", *examples(1)), DurableRounds(RunFolder(run)).about
    )
    found = DurableRounds(RunFolder(run))(None)
    opening = PeFLLTrainRequest(**found.opening.tensors())
    with refusing(DataError, "PeFLLTrainRequest", "train"):
        client.speak(1, 0, opening)


@pytest.mark.parametrize(
    ("how", "error", "output"),
    [
        ({"budget": 1.0}, ExperimentError, "budget needs ledger"),
        ({"ledger": "l", "budget": 0.0}, ExperimentError, r"budget must .*above 0 \(got 0\.0\)"),
        ({"ledger": "l", "budget": math.nan}, ExperimentError, r"budget must .*\(got nan\)"),
        ({"ledger": "l", "epsilon": None, "clip": None}, ExperimentError, r"epsilon must .*ledger.*\(got none\)"),
        ({"ledger": "l", "epsilon": math.inf}, ExperimentError, r"epsilon must .*ledger.*\(got inf\)"),
        ({"ledger": "nowhere/l"}, StorageError, "cannot be written: no such file or directory; nothing was released"),
        ({"ledger": "torn"}, DataError, 'torn, line 2: \'{"version": 2, "noise_mul\' is not a ledger line'),
        ({"ledger": "older"}, DataError, "older, line 1: .*version 1"),
    ],
)
def test_invalid_ledgers_and_budgets_are_rejected(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], error: type[Exception], output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    first = digests.line_of({"version": 2, "delta": 1e-5}, digests.beginning("ledger"))
    (tmp_path / "torn").write_bytes(first + b'{"version": 2, "noise_mul')
    (tmp_path / "older").write_text('{"version": 1, "noise_multiplier": 3.7}\n')
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(error, match=output):
        fedloom.personalize(str(run), *examples(1), **{"epsilon": 1.0, "clip": 0.5, **how})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_private_descriptor_is_sent_once(tmp_path: Path) -> None:
    on_vowels(tmp_path, PEFLL, rounds=2).run()
    run, (x, y) = tmp_path / "run", examples(1)
    request = PersonalizationRequest("here", x, y, epsilon=1.0, clip=0.5)
    client = RequestingClient.described(request, DurableRounds(RunFolder(run)).about)
    found = [DurableRounds(RunFolder(run), str(round))(None) for round in (0, 2)]
    openings = [one.opening for one in found if one is not None]
    first, second = (client.speak(0, 0, openings[0]) for _ in "ab")
    assert isinstance(first, Descriptor)
    assert isinstance(second, Descriptor)
    assert torch.equal(first.v, second.v)  # a broken conversation: repeating it reveals nothing more
    with pytest.raises(QuorumError, match="another round"):
        client.speak(2, 0, openings[1])
    at = free_address()
    with served(run, listen=at, checkpoint="0"):
        fedloom.personalize(at, x, y)
    with served(run, listen=at, checkpoint="2"):  # models cached from round 0 are not used
        assert fedloom.personalize(at, x, y, epsilon=1.0, clip=0.5).card.round == 2


def test_a_privately_trained_run_keeps_its_guarantee_for_new_clients(tmp_path: Path) -> None:
    privacy = {"clip": 0.25, "noise_multiplier": 2.0, "delta": 1e-6}
    on_vowels(tmp_path, {**PEFLL, "descriptor": {"train": "all", "evaluate": "all", "privacy": privacy}}).run()
    run, (x, y) = tmp_path / "run", examples(1)
    with served(run) as at:
        models = [fedloom.personalize(at, x, y) for _ in "ab"]
        stronger = fedloom.personalize(at, x, y, epsilon=0.1)
    assert not same(*models)
    assert promised(models[0]) == (pytest.approx(gaussian_epsilon(2.0, 1e-6)), 1e-6, 0.25, 20)
    assert promised(stronger) == (pytest.approx(0.1), 1e-5, 0.25, 20)


def test_privacy_for_a_method_without_a_descriptor_is_rejected(trained: Callable[[str], Path]) -> None:
    run = trained("fedavg")
    for where in (served(run), contextlib.nullcontext(str(run))):
        with where as at, pytest.raises(ExperimentError, match=r"epsilon .*descriptor.*pefll.*fedavg"):
            fedloom.personalize(at, *examples(1), epsilon=1.0, clip=1.0)


def test_conflicting_options_are_rejected(run: Path) -> None:
    x, y = examples(1)
    with pytest.raises(ExperimentError) as error:
        fedloom.personalize(str(run), x, y, predictor="mine")
    assert (error.value.key, error.value.found, error.value.allowed) == ("predictor", "mine", ["personal"])
    with pytest.raises(TypeError, match="timeout"):
        fedloom.personalize(str(run), x, y, timeout=2)
    with served(run) as at, pytest.raises(DataError, match="round 7"):
        fedloom.personalize(at, x, y, checkpoint=7)
    with pytest.raises(QuorumError, match="no model from"):
        fedloom.personalize(at, x, y, timeout_s=0.3)  # no server is left


def test_only_authorized_clients_get_models_and_the_audit_log_names_them(run: Path, tmp_path: Path) -> None:
    tokens, table, log = tmp_path / "tokens", tmp_path / "table.yaml", tmp_path / "audit.jsonl"
    secrets = {name: add_token(tokens, name)[0] for name in ("phone", "worker")}
    entries = [("phone", "personalize", ["eve", "eva"]), ("worker", "worker", ["*"])]
    table.write_text(json.dumps({"version": 1, "identities": [
        {"name": name, "token": name, "roles": [role], "clients": clients} for name, role, clients in entries
    ]}))  # fmt: skip
    x, y = examples(1)
    with served(run, protection=Protection(ServerOptions(tokens=tokens, identities=table)), audit=log) as at:

        def ask(client: str, secret: Any) -> Any:
            token = None if secret is None else secret.get_secret_value()
            return fedloom.personalize(at, x, y, client=client, token=token)

        assert same(ask("eve", secrets["phone"]), fedloom.personalize(str(run), x, y, client="eve"))
        with pytest.raises(RefusedError, match=r"phone .*bob"):
            ask("bob", secrets["phone"])
        with pytest.raises(RefusedError, match="worker"):
            ask("eve", secrets["worker"])
        with pytest.raises(RefusedError):
            ask("eve", None)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (handed,) = [event for event in events if event["event"] == "handed_out"]
    assert (handed["identity"], handed["client"], handed["round"]) == ("phone", "eve", 1)
    assert {event["kind"] for event in events if event["event"] == "refused"} >= {"clients", "forbidden"}


def test_an_aggregator_serves_models_of_its_last_durable_round(tmp_path: Path) -> None:
    loop = on_vowels(tmp_path, PEFLL)
    e, audit, (x, y) = experiments.load_experiment(tmp_path / "run" / "experiment.yaml"), Audit(), examples(1)
    parts, models = make_parts(e, loop.manifest), model_service(loop.folder, audit, e.runtime.threads)
    settings = ServingSettings(ServingOptions(listen="127.0.0.1:0", wait_s=0.1), Protection(), audit, "one")
    with aggregator_serving(parts, settings, print, models=models) as at:
        with pytest.raises(QuorumError, match="durable"):
            fedloom.personalize(at.address, x, y, timeout_s=0.2)
        loop.run()
        until = time.monotonic() + WAIT_S  # it checks every second, and may still serve round 0
        while (model := fedloom.personalize(at.address, x, y)).card.round != 1 and time.monotonic() < until:
            time.sleep(0.1)
    assert model.card.round == 1
    assert same(model, fedloom.personalize(str(tmp_path / "run"), x, y))


def test_serving_exports_prometheus_metrics(run: Path) -> None:
    port = free_port()
    with served(run, metrics=f"127.0.0.1:{port}") as at:
        fedloom.personalize(at, *examples(1))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert "fedloom_models_handed_out_total 1.0" in text
    assert "fedloom_served_round 1.0" in text
    assert float(re.findall(r'latency_seconds{quantile="0.99"} (\S+)', text)[0]) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="others do not divide connections")
def test_servers_that_share_a_port_divide_its_connections(run: Path) -> None:
    sharing = ModelServerSettings(share_port=True)
    x, y = examples(1)
    local = fedloom.personalize(str(run), x, y, client="eve")
    with served(run, settings=sharing) as at:
        with served(run, at, settings=sharing) as second:
            assert second == at
            for _ in range(21):  # odd: two counts differ
                assert same(fedloom.personalize(at, x, y, client="eve"), local)
            counts = {handed_out(at) for _ in range(40)}
            assert len(counts) == 2, "one server got every connection, which chance does in one of 2^39 runs"
            assert sum(counts) == 21
        for alone in (ModelServerSettings(), None):
            with pytest.raises(ExperimentError, match="is taken"), served(run, at, settings=alone):
                pass
        assert same(fedloom.personalize(at, x, y, client="eve"), local)
    with served(run) as at, pytest.raises(ExperimentError, match="is taken"), served(run, at, settings=sharing):
        pass


def test_a_terminated_server_drains(run: Path) -> None:
    with started("serve", run, "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        at = next(line for line in process.stdout if "serving models of" in line).split()[-1]
        with Raw(at) as raw, grpc.insecure_channel(at) as channel:
            asked = health_pb2.HealthCheckRequest(service=MODELS)
            assert health_pb2_grpc.HealthStub(channel).Check(asked).status == health_pb2.HealthCheckResponse.SERVING
            raw.ask()
            raw.read()
            process.terminate()
            until_gone(at)
            raw.say(Descriptor(torch.zeros(1, Raw.size)))
            assert raw.read()[0].last
        assert process.wait(WAIT_S) == 0


def test_the_command_line_requests_and_saves_a_model(tmp_path: Path, run: Path, fedloom_packed: Path) -> None:
    with served(run) as at:
        for where in (at, str(run)):
            personalize(where, tmp_path / "m.safetensors", data=[fedloom_packed])
            weights = load_file(tmp_path / "m.safetensors")
            assert set(weights) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
            assert len((tmp_path / "m.md").read_text().splitlines()) == 5
            network = torch.nn.Sequential()
            network.fc1, network.fc2 = torch.nn.Linear(9, 4), torch.nn.Linear(4, 11)
            network.load_state_dict(weights)
    for arguments, facts in (
        ({"out": tmp_path / "m.bin"}, ("packed", "data.dataset")),  # a folder, of all clients
        ({"data": []}, ("--data",)),
        ({"data": [fedloom_packed, fedloom_packed]}, ("--data",)),
        ({"clients": "a"}, ("--clients", tmp_path / "x.pt2")),
        ({"partition": "p"}, ("--partition", tmp_path / "x.pt2")),
        ({"epsilon": 0.0}, ("epsilon", "0.0")),
        ({"out": tmp_path / "x", "epsilon": 1.0}, ("--epsilon", "--out")),
        ({"out": tmp_path / "x", "ledger": tmp_path / "l"}, ("--ledger", "--out")),
        ({"epsilon": 1.0, "set_": ["clip=1"], "budget": 1.0}, ("budget", "ledger")),
        ({"where": "nowhere:0"}, ("HOST:PORT",)),
    ):
        given: dict[str, Any] = {
            "where": str(run), "out": tmp_path / "x.pt2", "data": [fedloom_packed], **arguments
        }  # fmt: skip
        with telling(ExperimentError, *facts):
            personalize(**given)


@pytest.fixture
def fedloom_packed(tmp_path: Path) -> Path:
    """Pack a client with some of the run's classes, in another order."""
    x, _ = examples(4, 30)
    names = ["had", "hid"]
    lines = [",".join([*(f"f{i}" for i in range(9)), "label"])]
    lines += [",".join([*map(str, row.tolist()), names[i % 2]]) for i, row in enumerate(x)]
    (tmp_path / "eve.csv").write_text("\n".join(lines) + "\n")
    pack(tmp_path / "eve.csv", tmp_path / "eve", PackSettings())
    return tmp_path / "eve"


@pytest.mark.exhaustive  # torch.export takes ten seconds and more
def test_exported_models_need_no_fedloom(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    x, y = examples(1)
    model = fedloom.personalize(str(run), x, y)
    for name in ("m.pt2", "m.onnx"):
        model.save(tmp_path / name)
    save_file({"x": x, "p": model(x)}, tmp_path / "expected.safetensors")
    script = (
        "import sys, torch\nfrom safetensors.torch import load_file\n"
        "e = load_file('expected.safetensors')\n"
        "p = torch.export.load('m.pt2').module()(e['x'])\n"
        "assert torch.equal(p, e['p'])\n"
        "import onnx\nfrom onnx.reference import ReferenceEvaluator\n"
        "m = onnx.load('m.onnx')\n"
        "(q,) = ReferenceEvaluator(m).run(None, {m.graph.input[0].name: e['x'].numpy()})\n"
        "assert abs(torch.from_numpy(q) - e['p']).max() < 1e-5\n"
        "assert 'fedloom' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=WAIT_S)
