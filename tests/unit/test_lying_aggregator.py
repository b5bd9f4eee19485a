"""Attacks of a lying aggregator on secure sums: it gets one honest sum of each question, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from facts import mentions
from federations import IMAGE, clients, problem_of
from lying_aggregator import (
    NAMES,
    SECURE,
    THETA,
    VICTIM,
    Ask,
    Drawing,
    Lie,
    Measure,
    ToldApart,
    ask,
    explained,
    federation,
    part,
    summation,
)
from torch import Tensor

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.fedavg import PersonalizeRequest, SharedModel
from fedloom.federation.client_side import ClientConfig, ClientSide
from fedloom.federation.loop import vocabulary
from fedloom.federation.transport import ConversationKey, Lost
from fedloom.messages import Message
from fedloom.models.networks import MLP
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.privacy.settings import SecureAggregation, TrainingPrivacy
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.messages import STEPS, ConfirmationDelivery, KeyRoster, SumSession, Survivors
from fedloom.sums.revealed_sums import RECORD, RevealedSums
from fedloom.sums.summation import Summation

OTHERS = NAMES[1:]
DEAD = torch.zeros(3, dtype=torch.float64)


def test_an_honest_aggregator_gets_the_sum() -> None:
    liar = federation()
    for attempt in (1, 2):  # the same members may be asked again
        found = ask(liar, attempt=attempt)
        assert found is not None
        np.testing.assert_allclose(found, sum(part(name) for name in NAMES), atol=1e-6)
        assert explained([found, *liar.masked], part()) < 0.3


# --- E2, E3: the conversation of training under another name ----------------------------------------------------------


@pytest.mark.parametrize("purpose", ["x", "evaluate", "evaluate/3", "measure", "", "Train"])
@pytest.mark.parametrize("of", ["examples", "clients"])
def test_training_under_another_name_gets_no_noiseless_answer(purpose: str, of: str) -> None:
    """With privacy of examples members add noise only in training, with privacy of clients they clip only there."""
    method, data = find_algorithm("fedavg"), clients((12, 9, 8))
    problem = problem_of(MLP(IMAGE, (4,), 3), data)
    s = method.settings()
    privacy = TrainingPrivacy(of="clients", clip=1e-3, noise_multiplier=20.0, delta=1e-5, noise="distributed")
    secure = SecureAggregation(signatures="none", bits=64)
    summed = Summation(method.sums(s), secure, privacy, torch.float64, clients_per_round=3)
    side = ClientSide(
        method.client(s, problem),
        vocabulary(method),
        {c.id: c for c in data}.__getitem__,
        lambda predictors, members: SharedModel(torch.zeros(1)),
        ClientConfig(
            7,
            held=HeldAnswers(summed, NO_SIGNING) if of == "clients" else None,
            examples=ExamplePrivacy(1.0, 20.0) if of == "examples" else None,
            secret=b"secret",
        ),
        after_steps={3: method.client(s, problem)},
    )
    opening = SharedModel(problem.model.init(torch.Generator().manual_seed(0), torch.float64))
    key = ConversationKey(1, 1, 0, "train")
    assert not any(isinstance(answer, Lost) for _, answer in side.answer(key, 0, [0, 1], ["c0", "c1"], opening))
    for row, answer in side.answer(replace(key, purpose=purpose), 0, [0, 1], ["c0", "c1"], opening):
        assert isinstance(answer, Lost), (row, answer)
        assert mentions(answer.reason, "SharedModel") or "/" in purpose
    personal = PersonalizeRequest(opening.theta)
    ((_, answer),) = side.answer(key, 0, [0], ["c0"], personal)  # nor does personalization take part in training
    assert isinstance(answer, Lost)


# --- A, B, C: members that are asked different questions --------------------------------------------------------------

DIFFERENT = {
    "a bound on examples that hides the others (A)": {"secure": SECURE.model_copy(update={"examples": 2**62})},
    "a range that hides the others (B)": {"secure": SECURE.model_copy(update={"range": 1e30})},
    "another experiment, such as a tiny learning rate (B)": {"run": b"lr: 1e-30"},
    "other bits": {"secure": SECURE.model_copy(update={"bits": 32})},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_members_with_different_experiments_share_no_masks(changes: dict[str, object]) -> None:
    liar = federation(summations=dict.fromkeys(OTHERS, summation(**changes)))
    found = ask(liar)  # None, or masks that do not cancel, which look plausible about once in 2,000 times
    seen = [*liar.masked, *([] if found is None else [found])]
    assert all(explained(seen, part(name)) < 0.3 for name in NAMES)
    assert [type(message) for message in liar.sent[VICTIM]] == [Ask, SumSession, KeyRoster]  # it has sent no shares


@pytest.mark.parametrize("when", ["train", "evaluate"])
def test_members_with_different_models_share_no_masks(when: str) -> None:
    """Model inconsistency (C): a model that makes the answers of all others vanish."""

    def dead(name: str, key: ConversationKey, message: Message) -> tuple[ConversationKey, Message]:
        return key, type(message)(DEAD) if isinstance(message, Ask | Measure) and name != VICTIM else message

    liar = federation(lie=dead)
    opening = Ask(THETA) if when == "train" else Measure(THETA)
    assert ask(liar, purpose=when, message=opening) is None
    assert explained(liar.masked, part()) < 0.3


def test_members_in_different_rounds_share_no_masks() -> None:
    liar = federation(lie=lambda name, key, message: (replace(key, round=1 + (name == VICTIM)), message))
    found = ask(liar)
    assert found is not None  # of the others
    assert explained([found, *liar.masked], part()) < 0.3


def test_a_message_for_each_client_is_not_summed() -> None:
    """Nobody could compare it: the aggregator would send the others a model that makes their answers vanish."""
    theta = {VICTIM: THETA}
    liar = federation(
        lie=lambda name, key, message: (
            key,
            ToldApart(theta.get(name, DEAD)[None]) if isinstance(message, Ask) else message,
        )
    )
    assert ask(liar) is None
    assert any("single clients" in reason for reason in liar.reasons)


# --- D, H, E4: several sums of one question ---------------------------------------------------------------------------


def seen_in(liar: object, sets: Sequence[tuple[Sequence[str], int, str, Message]]) -> list[np.ndarray]:
    """Return the sums of these questions that an aggregator gets."""
    found = [
        ask(liar, names, round=round, attempt=attempt, purpose=purpose, message=message)  # type: ignore[arg-type]
        for attempt, (names, round, purpose, message) in enumerate(sets, start=1)
    ]
    return [one for one in found if one is not None]


SEVERAL = {
    "three sets of which two make the first (D)": [
        (NAMES, 1, "train", Ask(THETA)), (NAMES[1:4], 1, "train", Ask(THETA)), (NAMES[4:], 1, "train", Ask(THETA)),
    ],
    "one member fewer": [(NAMES, 1, "train", Ask(THETA)), (OTHERS, 1, "train", Ask(THETA))],
    "a later round of full batches (H)": [(NAMES, 1, "train", Ask(THETA)), (OTHERS, 2, "train", Ask(THETA))],
    "two evaluations (E4)": [(NAMES, 3, "evaluate", Measure(THETA)), (OTHERS, 4, "evaluate", Measure(THETA))],
    "an evaluation under another name (E4)": [(NAMES, 3, "evaluate", Measure(THETA)), (OTHERS, 3, "x", Measure(THETA))],
}  # fmt: skip


@pytest.mark.parametrize("sets", SEVERAL.values(), ids=SEVERAL)
def test_one_question_is_answered_over_one_set(sets: list[tuple[Sequence[str], int, str, Message]]) -> None:
    liar = federation()
    found = seen_in(liar, sets)
    assert explained([*found, *liar.masked], part()) < 0.4
    assert len(found) == 1


def test_a_round_with_other_batches_is_another_question() -> None:
    """Members draw other batches, so the difference of two sums is only similar to one answer (the remainder of H)."""
    found = seen_in(federation(Drawing), [(NAMES, 1, "train", Ask(THETA)), (OTHERS, 2, "train", Ask(THETA))])
    assert len(found) == 2
    found = seen_in(federation(Drawing), [(NAMES, 1, "train", Ask(THETA)), (OTHERS, 1, "train", Ask(THETA))])
    assert len(found) == 1


def test_an_answer_that_starts_from_another_state_is_another_sum(tmp_path: Path) -> None:
    """The same set twice, but with other settings for the answers: their difference could be one client's."""
    records = {name: RevealedSums() for name in NAMES}
    assert ask(federation(records=records)) is not None
    changed = federation(records=records, summations=dict.fromkeys(NAMES, summation(run=b"other")))
    assert ask(changed) is None


# --- J: the record ----------------------------------------------------------------------------------------------------


def test_invented_members_leave_no_trace(tmp_path: Path) -> None:
    invented = [f"invented-{i}" for i in range(40)]
    liar = federation(records={name: RevealedSums(tmp_path) for name in NAMES}, invented=invented)
    found = ask(liar, [*NAMES, *invented])
    assert explained([*liar.masked, *([] if found is None else [found])], part()) < 0.4
    assert not (tmp_path / RECORD).read_text()
    assert ask(liar, attempt=2) is not None
    assert ask(liar, OTHERS, attempt=3) is None


# --- everything -------------------------------------------------------------------------------------------------------

MODELS = (THETA, torch.tensor([0.3, 2.0, -1.0], dtype=torch.float64), DEAD)

FIELDS = [(cls, field.name) for cls in STEPS for field in cls.fields()]

SETS = (NAMES, OTHERS, NAMES[1:4], NAMES[4:], NAMES[:4])


@dataclass
class Told:
    """What an aggregator says to some members in place of the truth."""

    who: Sequence[str]
    model: int
    round: int
    purpose: str
    field: tuple[type[Message], str] | None
    how: str


def told(draw: random.Random) -> Told:
    """Return a lie, often to nobody."""
    few = draw.sample(NAMES, draw.randint(1, 6))
    return Told(
        draw.choice([(), (), (), OTHERS, (VICTIM,), few]),
        draw.randrange(3),
        draw.choice([1, 1, 2]),
        draw.choice(["train", "train", "evaluate", "x"]),
        draw.choice([None, draw.choice(FIELDS)]),
        draw.choice(["bit", "zeros", "ones"]),
    )


MALFORMED = {
    "empty": lambda tensor: tensor[:0],
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "flat": lambda tensor: tensor.reshape(-1),
    "nested": lambda tensor: tensor[None],
    "other type": lambda tensor: tensor.to(torch.int64 if tensor.is_floating_point() else torch.float32),
    "not finite": lambda tensor: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor + 200,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MALFORMED)
@pytest.mark.parametrize(("cls", "field"), FIELDS)
def test_a_malformed_step_loses_no_worker_and_reveals_nothing(cls: type[Message], field: str, how: str) -> None:
    """Members refuse it, and do not end; of rows, an aggregator can send only as many as there are clients."""

    def malformed(name: str, key: ConversationKey, message: Message) -> tuple[ConversationKey, Message]:
        if not isinstance(message, cls) or name != VICTIM:
            return key, message
        return key, replace(message, **{field: MALFORMED[how](message.tensors()[field])})

    liar = federation(lie=malformed)
    found = ask(liar)
    assert explained([*liar.masked, *([] if found is None else [found])], part()) < 0.4


ORDERED = [cls for cls in STEPS if cls.__name__ != "ClipNotice"]


@pytest.mark.parametrize(("due", "sent"), [(due, sent) for due in ORDERED for sent in ORDERED if due is not sent])
def test_a_step_at_another_place_reveals_nothing(due: type[Message], sent: type[Message]) -> None:
    """In place of the step that is due, the victim gets another one: an earlier one again, or one that it got before.

    The aggregator then asks over another set, so that two answers would differ by the victim's alone.
    """
    seen: dict[type[Message], Message] = {}

    def misplaced(name: str, key: ConversationKey, message: Message) -> tuple[ConversationKey, Message]:
        if name == VICTIM and type(message) is due and sent in seen:
            return key, seen[sent]
        if name == VICTIM:
            seen[type(message)] = message
        return key, message

    liar = federation(lie=misplaced)
    found = [ask(liar, attempt=1), ask(liar, attempt=2), ask(liar, OTHERS, attempt=3)]
    sums = [total for total in found if total is not None]
    assert explained([*sums, *liar.masked], part()) < 0.4


def test_a_member_that_refused_a_set_reveals_no_share_of_it() -> None:
    """The set was confirmed by nobody, but the aggregator goes on as if it had been, and begins the sum again."""
    liar = federation()
    first = ask(liar)
    side, key = liar.members[VICTIM], ConversationKey(1, 2, 0, "train")
    assert ask(liar, NAMES[:4], attempt=2) is None
    held = side._config.held
    assert held._held[key][0].member is None  # its secrets are gone, so that nothing can make it reveal a share
    session, roster, _, survivors = liar.sent[VICTIM][-4:]
    assert isinstance(session, SumSession)
    assert isinstance(survivors, Survivors)
    tags = ConfirmationDelivery(torch.zeros_like(survivors.receipts))
    for exchange, message in enumerate((tags, session, roster, survivors, tags), start=5):
        ((_, answer),) = side.answer(key, exchange, [0], [VICTIM], message)
        assert isinstance(answer, Lost)
    assert first is not None


def changed(tensor: Tensor, how: str) -> Tensor:
    """Return another tensor of the same form."""
    if how == "zeros":
        return torch.zeros_like(tensor)
    if how == "ones":
        return torch.ones_like(tensor)
    flat = tensor.clone().reshape(-1)
    if len(flat):
        flat[:1] = flat[:1] ^ 1 if not flat.is_floating_point() else flat[:1] + 1
    return flat.reshape(tensor.shape)


def lying(lie: Told) -> Lie:
    """Return the lie as a change of what members are sent."""

    def send(name: str, key: ConversationKey, message: Message) -> tuple[ConversationKey, Message]:
        if name not in lie.who:
            return key, message
        if isinstance(message, Ask | Measure):
            message = (Ask if lie.purpose == "train" else Measure)(MODELS[lie.model])
        if lie.field is not None and isinstance(message, lie.field[0]):
            field = lie.field[1]
            message = replace(message, **{field: changed(message.tensors()[field], lie.how)})
        return replace(key, round=lie.round, purpose=lie.purpose), message

    return send


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_nothing_beyond_honest_sums_follows_from_all_that_an_aggregator_gets(seed: int) -> None:
    """Least squares over all sums and masked answers; the smallest sum is over three, and explains a third of each."""
    draw, liar, found = random.Random(seed), federation(), []
    for attempt in range(1, 8):
        names, kind, model = draw.choice(SETS), draw.choice([Ask, Ask, Measure]), MODELS[draw.choice([0, 0, 1])]
        liar.lie, round = lying(told(draw)), draw.choice([1, 2])
        purpose = "train" if kind is Ask else "evaluate"
        total = ask(liar, names, round=round, attempt=attempt, purpose=purpose, message=kind(model))
        found += [] if total is None else [total]
    for theta in MODELS[:2]:
        for kind in (Ask, Measure):
            assert explained([*found, *liar.masked], part(theta=theta, kind=kind)) < 0.7
