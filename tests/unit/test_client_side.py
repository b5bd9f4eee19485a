"""The clients' side of conversations: idempotent, replayable, and batches with a lost client."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from facts import tells
from federations import clients, group, setup
from torch import Tensor

from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import SharedModel, Update
from fedloom.algorithms.pefll import (
    PEFLL,
    Descriptor,
    DescriptorRequest,
    DescriptorUpdate,
    EmbeddingUpdate,
    PeFLLClient,
    PeFLLSettings,
    PeFLLTrainRequest,
    PersonalizedModel,
)
from fedloom.algorithms.pfedgp import PFEDGP, PFedGPSettings
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.loop import vocabulary
from fedloom.federation.transport import ConversationKey, Lost, MissingConversation
from fedloom.messages import Message, Metrics
from fedloom.models.predictors import Predictors

DATA = clients((4, 9, 6, 5))
KEY = ConversationKey(1, 1, 0, "train")
HALF = PeFLLClient(
    PeFLLSettings.model_validate(
        {"local": {"steps": 3, "batch_size": 3, "momentum": 0.9}, "descriptor": {"size": 4, "batch_size": 3}}
    ),
    setup(),
)
RANDOM = torch.Generator().manual_seed(0)
ETA_V = HALF.embedding.init(RANDOM, torch.float64)
THETA = torch.randn(4, HALF.setup.model.layout.size, generator=RANDOM, dtype=torch.float64) / 10
D_V = torch.randn(4, 4, generator=RANDOM, dtype=torch.float64)
TALK = [PeFLLTrainRequest(ETA_V), PersonalizedModel(THETA), DescriptorUpdate(D_V)]


class Clients(ClientSide):
    """Conversations over DATA that count the accesses to data."""

    def __init__(self, at_once: int = 1, broken: str = "", failure: Exception | None = None) -> None:
        self.loads: list[str] = []
        by_id = {c.id: c for c in DATA}

        def load(id: str) -> ClientData:
            self.loads.append(id)
            if id == broken:
                raise failure or DataError(f"the shard of client {id} is missing", hint="make it again")
            return by_id[id]

        def conclude(predictors: Predictors, group: ClientGroup) -> Message:
            thetas = torch.stack([named["personal"].tensors()["theta"] for named in predictors])
            rest = EvaluationPlan.of_classes(1).nothing(len(thetas), 1).tensors() | {"counts": thetas}
            return Metrics(**rest)

        super().__init__(HALF, vocabulary(PEFLL), load, conclude, ClientConfig(0, clients_at_once=at_once))

    def ask(
        self, exchange: int, rows: Sequence[int], message: Message | None = None, key: ConversationKey = KEY
    ) -> dict[int, Message | Lost]:
        message = TALK[exchange] if message is None else message
        return dict(self.answer(key, exchange, rows, [f"c{row}" for row in rows], message.select(rows)))


def equal(one: Message | Lost, other: Message | Lost) -> bool:
    assert isinstance(one, Message)
    assert type(one) is type(other)
    return all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


def test_a_complete_conversation() -> None:
    found = Clients()
    for exchange, cls in enumerate((Descriptor, Update, EmbeddingUpdate)):
        answers = found.ask(exchange, range(4))
        assert list(answers) == [0, 1, 2, 3]
        assert all(type(answer) is cls for answer in answers.values())
        assert all(len(tensor) == 1 for a in answers.values() for tensor in a.tensors().values())  # type: ignore[union-attr]
    over = found.ask(3, [0], TALK[2])
    assert isinstance(over[0], Lost)
    assert over[0].is_bug
    assert tells(over[0].reason, "RuntimeError", "client_side.py", "line")


def test_a_repeated_exchange_is_not_recomputed() -> None:
    found = Clients()
    for exchange in range(3):
        first = found.ask(exchange, [0, 2])
        again = found.ask(exchange, [2, 0])
        assert list(again) == [2, 0]
        assert all(again[row] is first[row] for row in (0, 2))
    assert found.loads == ["c0", "c2"]


def test_replies_are_yielded_one_by_one() -> None:
    """A client's answer is available before the next client's work begins."""
    found = Clients()
    answers = found.answer(KEY, 0, [0, 1, 2], ["c0", "c1", "c2"], TALK[0])
    next(answers)
    assert found.loads == ["c0"]
    answers.close()  # type: ignore[attr-defined]
    assert list(found.ask(0, [0, 1])) == [0, 1]
    assert found.loads == ["c0", "c1"]


@pytest.mark.parametrize("known", [0, 1])
def test_an_exchange_without_earlier_ones_is_reported_missing(known: int) -> None:
    found = Clients()
    for exchange in range(known):
        found.ask(exchange, [0])
    with pytest.raises(MissingConversation) as missing:
        found.ask(known + 1, [0, 1])
    assert missing.value.rows == (0, 1)
    with pytest.raises(MissingConversation) as missing:
        found.ask(1, [0, 1])
    assert missing.value.rows == ((1,) if known else (0, 1))


def test_a_replay_after_a_restart_gives_equal_bits() -> None:
    before, after = Clients(), Clients()
    first = [before.ask(exchange, range(4)) for exchange in range(3)]
    for exchange in range(3):  # another process, the clients in another order, in two parts
        again = {**after.ask(exchange, [3, 1]), **after.ask(exchange, [0, 2])}
        assert all(equal(first[exchange][row], again[row]) for row in range(4))


def test_an_opening_repeated_later_restarts_the_conversation() -> None:
    found = Clients()
    first = [found.ask(exchange, [0, 1]) for exchange in range(2)]
    again = found.ask(0, [0])
    assert equal(first[0][0], again[0])
    assert equal(first[1][0], found.ask(1, [0])[0])
    assert found.ask(1, [1])[1] is first[1][1]  # the other row continues where it was


def test_a_row_that_continued_elsewhere_is_missing_and_restarts() -> None:
    """Its batch continued here without it; there is no answer for its later state."""
    found, undisturbed = Clients(at_once=2), Clients(at_once=2)
    expected = [undisturbed.ask(exchange, [0, 1]) for exchange in range(3)]
    found.ask(0, [0, 1])
    assert isinstance(found.ask(1, [0])[0], Update)
    with pytest.raises(MissingConversation) as missing:
        found.ask(1, [0, 1])
    assert missing.value.rows == (1,)
    for exchange in range(2):
        found.ask(exchange, [1])
    answers = list(found.answer(KEY, 2, [0, 1], ["c0", "c1"], TALK[2].select([0, 1])))
    assert [row for row, _ in answers] == [0, 1]
    for row, answer in answers:
        assert isinstance(answer, EmbeddingUpdate)
        torch.testing.assert_close(answer.d_eta_v, expected[2][row].d_eta_v)  # type: ignore[union-attr]


def test_conversations_are_independent() -> None:
    found, alone = Clients(), Clients()
    other = ConversationKey(1, 1, 1, "train")
    expected = [alone.ask(exchange, [0]) for exchange in range(3)]
    for exchange in range(3):
        mine = found.ask(exchange, [0])
        theirs = dict(found.answer(other, exchange, [0], ["c1"], TALK[exchange].select([0])))
        assert equal(mine[0], expected[exchange][0])
        assert not equal(mine[0], theirs[0])
    found.close(KEY)
    found.close(KEY)
    with pytest.raises(MissingConversation):
        found.ask(2, [0])
    found.close_all()


@pytest.mark.parametrize(
    "later",
    [ConversationKey(1, 2, 0, "train"), ConversationKey(1, 0, 0, "evaluate"), ConversationKey(2, 1, 0, "train")],
)
@pytest.mark.parametrize("exchange", [0, 1])
def test_unclosed_conversations_end_with_the_next_attempt(later: ConversationKey, exchange: int) -> None:
    """Their coroutines hold tensors; a worker that is disconnected when they are closed is never notified."""
    found = Clients()
    found.ask(0, [0, 1])
    coroutines = [opened.coroutine for opened in found._open[KEY].values()]
    assert all(inspect.getgeneratorstate(coroutine) == inspect.GEN_SUSPENDED for coroutine in coroutines)  # type: ignore[arg-type]
    with pytest.raises(MissingConversation) if exchange else nullcontext():
        list(found.answer(later, exchange, [0], ["c0"], TALK[exchange].select([0])))
    assert all(inspect.getgeneratorstate(coroutine) == inspect.GEN_CLOSED for coroutine in coroutines)  # type: ignore[arg-type]
    # A late request of an earlier attempt has no effect.
    found.ask(0, [0])
    assert later in found._open


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_failed_client_stays_lost_and_others_continue(at_once: int) -> None:
    """Serve the other clients of its batch one by one."""
    found, alone = Clients(at_once, broken="c3"), Clients()
    for exchange in range(3):
        answers, expected = found.ask(exchange, range(4)), alone.ask(exchange, range(4))
        assert isinstance(lost := answers[3], Lost)
        assert tells(lost.reason, "client c3", "its data")
        for row in range(3):
            near(answers[row], expected[row])


@pytest.mark.parametrize(
    ("failure", "facts"),
    [
        (DataError("the shard /srv/hospital/north-1/shard.safetensors is damaged"), ("client c3", "its data")),
        (DataError("train_x in /srv/hospital: expected tokens in 0 ... 9, found 79"), ("client c3", "its data")),
        (
            ValueError("could not convert string to float: 'Jane Doe, 12.3.1961'"),
            ("ValueError", "test_client_side.py", "line"),
        ),
    ],
)
def test_the_reason_of_a_lost_client_reveals_neither_paths_nor_values(
    failure: Exception, facts: tuple[str, ...]
) -> None:
    (lost,) = Clients(broken="c3", failure=failure).ask(0, [3]).values()
    assert isinstance(lost, Lost)
    assert tells(lost.reason, *facts)
    assert not any(output in lost.reason for output in ("hospital", "79", "Jane"))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_batch_loses_only_the_client_that_cannot_train(at_once: int) -> None:
    """The method detects it during the round, instead of the reader, as if missing labels were not known beforehand."""
    one = dataclasses.replace(DATA[1], train=Split(DATA[1].train.x, torch.zeros_like(DATA[1].train.y)))
    by_id = {c.id: c for c in (DATA[0], one, DATA[2])}
    half = PFEDGP.client(PFedGPSettings(gibbs_steps=1, chains=2), setup())
    config = ClientConfig(0, clients_at_once=at_once)
    side = ClientSide(half, vocabulary(PFEDGP), by_id.__getitem__, lambda *_: opening, config)
    opening = SharedModel(torch.zeros(setup().model.layout.body_size).double())
    answers = dict(side.answer(KEY, 0, range(3), list(by_id), opening))
    assert [isinstance(answers[row], Update) for row in range(3)] == [True, False, True]
    assert isinstance(lost := answers[1], Lost)
    assert tells(lost.reason, "client c1", "one class")


def test_a_batch_that_exceeds_the_memory_is_computed_one_by_one_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error is torch's own; a CPU never raises it, so one client's data raise it here."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of")
    found, alone = Clients(4, broken="c3", failure=full), Clients(broken="c3", failure=full)
    with caplog.at_level(logging.WARNING):
        answers, expected = found.ask(0, range(4)), alone.ask(0, range(4))
    reported = [record.getMessage() for record in caplog.records if "runtime.clients_at_once" in record.getMessage()]
    assert [("4 clients" in line, "CUDA out of memory" in line) for line in reported] == [(True, True)]
    for row in range(3):
        near(answers[row], expected[row])
    assert isinstance(answers[3], Lost)


@pytest.mark.parametrize(("failure", "traceback"), [(None, False), (ValueError("found 7"), True)])
def test_an_error_in_a_clients_data_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture, failure: Exception | None, traceback: bool
) -> None:
    with caplog.at_level(logging.INFO, ClientSide.__module__):
        Clients(broken="c1", failure=failure).ask(0, [1])
    (record,) = caplog.records
    assert bool(record.exc_info) is traceback
    assert "\n" not in record.getMessage()
    assert traceback or tells(record.getMessage(), "c1", "the shard of client c1 is missing")
    with caplog.at_level(logging.DEBUG, ClientSide.__module__):
        Clients(broken="c1", failure=failure).ask(0, [1])
    assert caplog.records[-1].exc_info


def test_a_state_of_the_wrong_shape_is_named() -> None:
    states, new = [{"head": torch.ones(3)}, {"head": torch.ones(4)}], torch.zeros(2, 3)
    assert torch.equal(
        ClientGroup(DATA[:1], group(DATA)._generator, states[:1]).load_state("head", new[:1]), torch.ones(1, 3)
    )
    with pytest.raises(DataError, match=r"client c1: .*head.*\(4,\).*\(3,\)"):
        ClientGroup(DATA[:2], group(DATA)._generator, states).load_state("head", new)


def test_a_message_that_cannot_open_a_conversation_loses_the_client_with_the_reason() -> None:
    (answer,) = Clients().ask(0, [0], TALK[1]).values()
    assert isinstance(answer, Lost)
    assert answer.is_bug
    assert tells(answer.reason, "TypeError", "base.py", "line")


def test_predictors_are_evaluated_on_the_client() -> None:
    found = Clients()
    evaluation = dataclasses.replace(KEY, purpose="evaluate")
    found.ask(0, range(4), DescriptorRequest(ETA_V), evaluation)
    answers = found.ask(1, range(4), PersonalizedModel(THETA), evaluation)
    for row, answer in answers.items():
        assert isinstance(answer, Metrics)
        assert torch.equal(answer.counts[0], THETA[row])
    assert found.ask(1, [2], PersonalizedModel(THETA), evaluation)[2] is answers[2]


# --- batches of clients -----------------------------------------------------------------------------------------------


def near(one: Message | Lost, other: Message | Lost) -> None:
    assert isinstance(one, Message)
    assert isinstance(other, Message)
    tensors: dict[str, Tensor] = other.tensors()
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("exchange", [1, 2])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_batch_continues_without_a_lost_client(exchange: int, lost: int) -> None:
    single, grouped = Clients(), Clients(at_once=3)
    alive = [0, 1, 2]
    for t in range(3):
        if t == exchange:
            alive.remove(lost)
        alone, together = single.ask(t, alive), grouped.ask(t, alive)
        assert list(together) == alive
        for row in alive:
            near(together[row], alone[row])


def test_repeated_clients_have_separate_conversations() -> None:
    """A cohort drawn with replacement contains the same client twice: each row has a separate conversation."""
    found = Clients()
    opened = dict(found.answer(KEY, 0, [0, 1], ["c2", "c2"], TALK[0]))
    assert equal(opened[0], opened[1])
    models = PersonalizedModel(THETA[:2])
    trained = dict(found.answer(KEY, 1, [0, 1], ["c2", "c2"], models))
    assert not equal(trained[0], trained[1])
