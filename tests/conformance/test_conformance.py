"""Properties that hold for every method under faults of its clients (docs/federation.md).

pytest tests/conformance --algorithm NAME --settings 'local: {epochs: 1}'

runs these tests for one registered method, from this repository or another.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
from typing import Any

import pytest
import torch
from conformance_kit import (
    COHORT,
    ROUNDS,
    Exchange,
    Faulty,
    Federation,
    Huge,
    Killed,
    Poisoned,
    Spread,
    assert_equal_but_for_traffic,
    same_bits,
    state,
)

from fedloom.engine import assemble
from fedloom.errors import DataError, ExitCode, InterruptedRun, QuorumError
from fedloom.evaluation.group_statistics import groups
from fedloom.federation.loop import Loop
from fedloom.federation.transport import Call
from fedloom.runs.folder import RunFolder

AT = 2
"""The round that is disturbed: one before it and one after it are not."""


def training(call: Call, round: int = AT) -> bool:
    return call.key.purpose == "train" and call.key.round == round


def assert_finite(loop: Loop) -> None:
    for name, tensor in loop.server.state.items():
        assert torch.isfinite(tensor).all(), name


def steps(tiny: Federation, name: str) -> float:
    return next(a.statistics["client_steps"] for a in tiny.attempts(name) if a.round == AT and a.outcome == "done")


def measured_at_the_end(tiny: Federation) -> Federation:
    """Return the federation with a single evaluation, after the last round: evaluation takes half of a run's time."""
    return tiny.changed(evaluation__every=ROUNDS)


# --- absence ----------------------------------------------------------------------------------------------------------


def test_losing_any_client_at_any_exchange_and_replaying_it(tiny: Federation, trained: str) -> None:
    exchanges, tiny = tiny.exchanges(), measured_at_the_end(tiny)
    for exchange in exchanges:
        for row in exchange.rows:
            name = f"lost-{exchange.conversation}-{exchange.exchange}-{row}"
            lose = lambda call, r, e=exchange, row=row: training(call) and e.same(call) and r == row  # noqa: E731
            loop = tiny.disturbed(name, lose)
            assert loop.round == ROUNDS
            assert_finite(loop)
            attempt = next(a for a in tiny.attempts(name) if a.round == AT)
            lost = [(loss.row, loss.exchange) for loss in attempt.conversations[exchange.conversation].lost]
            assert (attempt.outcome, lost) == ("done", [(row, exchange.exchange)])

            # Only the server's state affects the evaluation and a replay unless clients keep states: once is enough.
            if tiny.parts.client_algorithm().stateful or row == exchange.rows[exchange.exchange % COHORT]:
                tiny.resume(name)
                tiny.run(f"{name}-replayed", replay=name)
                assert tiny.final(f"{name}-replayed") == tiny.final(name)
                assert tiny.metrics(f"{name}-replayed") == tiny.metrics(name)
                assert tiny.attempts(f"{name}-replayed") == tiny.attempts(name)


def test_client_steps_count_the_clients_that_made_them(tiny: Federation, trained: str) -> None:
    """The state is finite with every single survivor of a round, and with any two."""
    tiny = measured_at_the_end(tiny)
    tiny.recorded("undisturbed", upto=AT)
    alone = []
    for row in range(COHORT):
        others_lost = lambda call, r, row=row: training(call) and r != row  # noqa: E731
        assert_finite(tiny.disturbed(f"alone-{row}", others_lost, upto=AT))
        alone.append(steps(tiny, f"alone-{row}"))
    assert min(alone) > 0
    assert steps(tiny, "undisturbed") == sum(alone)
    for row in range(COHORT):
        never_there = lambda call, r, row=row: training(call) and r == row  # noqa: E731
        assert_finite(tiny.disturbed(f"without-{row}", never_there, upto=AT))
        assert steps(tiny, f"without-{row}") == sum(alone) - alone[row]


def test_exchanges_with_one_survivor(tiny: Federation, thorough: str) -> None:
    exchanges, tiny = tiny.exchanges(), measured_at_the_end(tiny)
    for exchange in exchanges:
        for survivor in exchange.rows:
            leave_one(tiny, exchange, survivor)


@pytest.mark.sampled(3)
def test_a_random_exchange_with_one_survivor(tiny: Federation, sampled: str) -> None:
    draw = random.Random(sampled)
    exchange = draw.choice(tiny.exchanges())
    tiny = measured_at_the_end(tiny)
    leave_one(tiny, exchange, draw.choice(exchange.rows))


def leave_one(tiny: Federation, exchange: Exchange, survivor: int) -> None:
    """Check that a run goes on after all but one client are lost at an exchange."""
    name = f"survivor-{exchange.conversation}-{exchange.exchange}-{survivor}"
    loop = tiny.disturbed(name, lambda call, row: training(call) and exchange.same(call) and row != survivor)
    assert loop.round == ROUNDS
    assert_finite(loop)


def test_an_attempt_that_loses_every_client_changes_nothing_and_is_retried(tiny: Federation, trained: str) -> None:
    exchanges, tiny = tiny.exchanges(), measured_at_the_end(tiny)
    for exchange in exchanges:
        name = f"everybody-{exchange.conversation}-{exchange.exchange}"
        lose = lambda call, row, e=exchange: training(call) and call.key.attempt == 1 and e.same(call)  # noqa: E731
        tiny.recorded(name, upto=AT - 1)
        loop = tiny.loop(name, Faulty(tiny.transport(name), lose), upto=ROUNDS)
        loop.resume()
        before = [state(loop)]
        unchanged: list[bool] = []
        loop.observer.on_round = lambda attempt, loop=loop, before=before: before.append(state(loop))
        loop.observer.on_failure = lambda attempt, loop=loop, before=before, unchanged=unchanged: unchanged.append(
            same_bits(before[-1], state(loop))
        )
        loop.advance()
        assert unchanged == [True]
        made = [(a.round, a.attempt, a.outcome == "done") for a in tiny.attempts(name)]
        assert made == [(1, 1, True), (2, 1, False), (2, 2, True), (3, 1, True)]


def test_the_run_stops_with_its_last_round_durable_if_every_attempt_fails(tiny: Federation, thorough: str) -> None:
    tiny.recorded("whole")
    tiny = tiny.changed(federation__checkpoint_every_s=1e9)
    loop = tiny.loop("failed", Faulty(tiny.transport("failed"), lambda call, row: training(call)))
    output = r"client-\d+ was lost: injected; 0 of 3 clients answered.*round 2 failed 3 times"
    with pytest.raises(QuorumError, match=output) as failure:
        loop.run()
    assert failure.value.exit_code is ExitCode.QUORUM
    assert loop.checkpoints.rounds()[-1] == AT - 1
    tiny.resume("failed")
    assert tiny.final("failed") == tiny.final("whole")
    assert tiny.metrics("failed") == tiny.metrics("whole")


def test_min_replies(tiny: Federation, thorough: str) -> None:
    tiny = measured_at_the_end(tiny).changed(federation__min_replies=2)
    for lost, made in ((1, [1]), (2, [1, 2])):

        def lose(call: Call, row: int, lost=lost) -> bool:
            return training(call) and (call.key.attempt, call.key.conversation) == (1, 0) and row < lost

        tiny.disturbed(f"{lost}-lost", lose)
        assert [a.attempt for a in tiny.attempts(f"{lost}-lost") if a.round == AT] == made
        tiny.advance(f"{lost}-replayed", replay=f"{lost}-lost")
        assert tiny.final(f"{lost}-replayed") == tiny.final(f"{lost}-lost")


def test_a_reply_that_is_not_finite_loses_only_its_client(tiny: Federation, trained: str) -> None:
    tiny = tiny.changed(federation__rounds=1)
    calls = tiny.recorded("whole", upto=1)
    first = [call for call in calls if training(call, 1) and call.key.conversation == 0]
    row = 1
    client, opening = first[0].clients[row], type(first[0].message)
    for call in first:
        name = f"nan-{call.exchange}"
        poisoned = tiny.transport(name, lambda half, e=call.exchange: Poisoned(half, opening, client, e))
        loop = tiny.advance(name, poisoned)
        assert_finite(loop)
        (attempt,) = tiny.attempts(name)
        (loss,) = attempt.conversations[0].lost
        assert (loss.client, loss.exchange) == (client, call.exchange)
        assert "is not finite" in loss.reason
        assert sum(attempt.refused.values()) == 1
        lose = lambda c, r, e=call.exchange: training(c, 1) and (c.key.conversation, c.exchange, r) == (0, e, row)  # noqa: E731
        tiny.advance(f"{name}-lost", Faulty(tiny.transport(f"{name}-lost"), lose))
        assert tiny.final(f"{name}-lost") == tiny.final(name)


GROWS: dict[str, dict[str, Any]] = {
    **{name: {"beta": 2.0} for name in ("pfedbayes", "pfedbayes:kept", "pfedbayes:ivon")},
    "wga": {"lr": 2.0},
}
"""Settings with which the server's step is longer than what it averages: else it stays finite, as it may."""


def test_out_of_range_replies_are_rejected(tiny: Federation, trained: str) -> None:
    """Every answer is finite, but far larger than a model can be."""
    loop = tiny.loop("absurd", tiny.transport("absurd", Huge))
    before = state(loop)
    with pytest.raises(QuorumError, match="value out of range"):
        loop.run()
    assert same_bits(before, state(loop))


def test_a_state_that_would_not_be_finite_is_discarded(
    tiny: Federation, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is finite, but its sum with the state, a square or a product overflows.

    A third-party method may take steps so small that these rounds overflow nothing: then all rounds are completed
    with a finite state.
    """
    monkeypatch.setattr("fedloom.federation.validation.VALUE_LIMIT", math.inf)
    tree = tiny.parts.experiment.model_dump(mode="json")["algorithm"]
    rounds = 4
    tiny = tiny.changed(algorithm={**tree, **GROWS.get(trained, {})}, federation__rounds=rounds)
    loop = tiny.loop("huge", tiny.transport("huge", Huge))
    states = [state(loop)]
    unchanged: list[bool] = []
    loop.observer.on_round = lambda attempt: states.append(state(loop))
    loop.observer.on_failure = lambda attempt: unchanged.append(same_bits(states[-1], state(loop)))
    ours = tiny.parts.algorithm.server.__module__.startswith("fedloom.")
    with pytest.raises(QuorumError) if ours else contextlib.suppress(QuorumError):
        loop.run()
    assert_finite(loop)
    failed = [attempt for attempt in tiny.attempts("huge") if attempt.outcome != "done"]
    attempts = 0 if loop.round == rounds else loop.schedule.attempts
    assert [attempt.round for attempt in failed] == [loop.round + 1] * attempts
    assert all("not finite" in attempt.outcome for attempt in failed)
    assert unchanged == [True] * attempts
    assert same_bits(states[-1], state(loop))


def test_journals_of_other_experiments_are_not_replayed(tiny: Federation, thorough: str) -> None:
    tiny.recorded("whole")
    folder = RunFolder(tiny.tmp / "whole")
    lines = list(folder.lines("journal.jsonl"))
    spoilt = json.loads(json.dumps(lines))
    spoilt[AT - 1]["conversations"][0]["clients"][0] = "client-9999"
    folder.rewrite("journal.jsonl", spoilt)
    with pytest.raises(DataError, match=r"client-9999 .*round 2\b"):
        tiny.run("stranger", replay="whole")
    lines[AT - 1]["conversations"] = []
    folder.rewrite("journal.jsonl", lines)
    with pytest.raises(DataError, match=r"\b0 .*round 2\b"):
        tiny.run("silent", replay="whole")


# --- kill and resume --------------------------------------------------------------------------------------------------


def test_resuming_after_a_kill_at_any_exchange(tiny: Federation, thorough: str) -> None:
    """Checkpoint after every round, or only at the end, in turn."""
    calls = tiny.recorded("whole")
    for i in range(len(calls)):
        killed_and_resumed(tiny.changed(federation__checkpoint_every_s=(0.0, 1e9)[i % 2]), i, calls)


@pytest.mark.sampled(3)
def test_resuming_after_a_kill_at_one_exchange_of_each_kind(tiny: Federation, sampled: str) -> None:
    """Kill the run at a random but fixed call; checkpoint after every round, or only at the end, in turn."""
    calls = tiny.recorded("whole")
    kinds: dict[tuple[str, int], list[int]] = {}
    for i, call in enumerate(calls):
        kinds.setdefault((call.key.purpose, call.exchange), []).append(i)
    draw = random.Random(sampled)
    seldom = draw.randrange(2)
    for k, those in enumerate(kinds.values()):
        often = tiny.changed(federation__checkpoint_every_s=1e9 if k % 2 == seldom else 0.0)
        killed_and_resumed(often, draw.choice(those), calls)


def killed_and_resumed(tiny: Federation, i: int, calls: list[Call]) -> None:
    """Check that a run killed at its i-th call and resumed ends like the complete one."""
    name = f"killed-{i}"
    left = iter(range(i + 1))

    def kill(call: Call) -> None:
        if next(left) == i:
            raise Killed

    with pytest.raises(Killed):
        tiny.run(name, Faulty(tiny.transport(name), before=kill))
    tiny.resume(name)
    assert tiny.final(name) == tiny.final("whole"), calls[i].key
    assert tiny.metrics(name) == tiny.metrics("whole")
    assert tiny.attempts(name) == tiny.attempts("whole")


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_stopping_loses_no_client(tiny: Federation, thorough: str, purpose: str) -> None:
    """A stopped transport loses the clients that have not answered; the run must not record these losses."""
    calls = [c for c in tiny.recorded("whole") if c.key.purpose == purpose and c.key.round == AT]
    for call in calls:
        name = f"stopped-{call.key.conversation}-{call.exchange}"
        stop = threading.Event()

        def lose(other: Call, row: int, call=call, stop=stop) -> bool:
            if (other.key, other.exchange) == (call.key, call.exchange):
                stop.set()
            return stop.is_set() and row > 0

        with pytest.raises(InterruptedRun) as stopped:
            tiny.loop(name, Faulty(tiny.transport(name), lose), stop=stop).run()
        assert stopped.value.exit_code is ExitCode.INTERRUPTED
        assert not any(c.lost for a in tiny.attempts(name) for c in a.conversations)
        tiny.resume(name)
        assert tiny.final(name) == tiny.final("whole")
        assert tiny.metrics(name) == tiny.metrics("whole")


# --- placement --------------------------------------------------------------------------------------------------------


def test_placement_of_clients_does_not_change_results(tiny: Federation, method: str) -> None:
    """Two places serve every client; then each of three serves its own."""
    tiny.recorded("whole")
    everyone = [entry.id for entry in tiny.dataset.manifest.clients]
    apart = [frozenset(everyone[i::3]) for i in range(3)]
    for name, serves in (("shared", [frozenset(everyone)] * 2), ("apart", apart)):
        tiny.run(name, Spread([tiny.transport(name) for _ in serves], serves))
        assert_equal_but_for_traffic(tiny, name, "whole")


# --- personalization --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
def test_evaluation_changes_no_state_and_is_repeatable(tiny: Federation, method: str) -> None:
    tiny.recorded("run")
    again = tiny.loop("run")
    again.resume()
    before = state(again)
    first, second = again.evaluate(), again.evaluate()
    assert same_bits(before, state(again))
    assert torch.equal(first.counts, second.counts)
    for name, values in first.records.items():
        assert torch.equal(values, second.records[name])


def test_training_does_not_depend_on_evaluation(tiny: Federation, trained: str) -> None:
    states = []
    for every in (1, ROUNDS):
        changed, name = tiny.changed(evaluation__every=every), f"every-{every}"
        changed.trained(name)
        loop = changed.loop(name)
        loop.resume()
        states.append(state(loop))
    assert same_bits(*states)


@pytest.mark.sampled(3)
def test_clients_not_seen_in_training_get_predictors(tiny: Federation, method: str) -> None:
    tiny.trained("run")
    evaluation = tiny.resume("run")
    assert evaluation.present.all()
    assert int((~evaluation.seen).sum()) == 2
    assert "personal" in evaluation.predictors
    for predictor in evaluation.predictors:
        tested = evaluation.of(predictor, "test", "unmasked")
        assert torch.isfinite(tested).all()
        expected = torch.tensor([entry.test for entry in tiny.dataset.manifest.clients], dtype=torch.float64)
        assert torch.equal(tested[:, 1], expected)
    lost = tiny.loop("run").personalize([entry.id for entry in tiny.dataset.manifest.clients if not entry.seen])
    assert lost == {}


def test_predictors_return_probabilities(tiny: Federation, method: str) -> None:
    """Rows sum to one, and saved tensors are finite."""
    seen: list[str] = []

    def look(predictors, group):
        for named, client in zip(predictors, group.clients, strict=True):
            for predictor in named.values():
                p = predictor.probabilities(client.test.x)
                assert torch.allclose(p.sum(1), torch.ones(len(p)), atol=1e-5)
                assert all(torch.isfinite(tensor).all() for tensor in predictor.tensors().values())
            seen.append(client.id)
        return tiny.parts.plan.nothing(len(predictors), len(loop.predictors))

    loop = tiny.loop("run", assemble.in_process(tiny.parts, tiny.dataset, RunFolder(tiny.tmp / "run"), look))
    assert loop.personalize([entry.id for entry in tiny.dataset.manifest.clients]) == {}
    assert sorted(seen) == sorted(entry.id for entry in tiny.dataset.manifest.clients)


def test_clients_lost_in_an_evaluation_are_left_out(tiny: Federation, method: str) -> None:
    calls = tiny.recorded("whole")
    final = max(call.key.round for call in calls)
    last = max(call.exchange for call in calls if call.key.purpose == "evaluate")
    for exchange in range(last + 1):
        for rows in ({0}, {0, 1, 2, 3}):  # a single row, and a whole cohort
            name = f"absent-{exchange}-{len(rows)}"

            def lose(call: Call, row: int, exchange=exchange, rows=rows) -> bool:
                measured = call.key.purpose == "evaluate" and call.key.round == final
                return measured and call.key.conversation == 0 and call.exchange == exchange and row in rows

            tiny.trained(name)
            evaluation = tiny.resume(name, Faulty(tiny.transport(name), lose))
            assert (~evaluation.present).nonzero().flatten().tolist() == sorted(rows)
            statistics = groups(evaluation, label_mask=False)
            assert statistics["seen"]["clients"] == int((evaluation.seen & evaluation.present).sum())
            assert tiny.metrics(name)[-1]["left_out"]["absent"] == len(rows)
        tiny.run(f"{name}-replayed", replay=name)
        assert tiny.final(f"{name}-replayed") == tiny.final(name)
        assert tiny.metrics(f"{name}-replayed") == tiny.metrics(name)


def test_an_evaluation_without_replies(tiny: Federation, method: str) -> None:
    tiny.trained("nobody")
    evaluation = tiny.resume(
        "nobody", Faulty(tiny.transport("nobody"), lambda call, row: call.key.purpose == "evaluate")
    )
    assert not evaluation.present.any()
    assert tiny.metrics("nobody")[-1]["seen"] is None
    json.dumps(tiny.metrics("nobody"), allow_nan=False)
    assert set(
        tiny.loop("nobody", Faulty(tiny.transport("nobody"), lambda call, row: True)).personalize(evaluation.clients)
    ) == {*evaluation.clients}
