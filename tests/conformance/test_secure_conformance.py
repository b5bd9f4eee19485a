"""Every method whose server needs only sums, under secure aggregation and faults of its clients.

The cohorts are those of runs without secure aggregation, so that each run has a plain one to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from conformance_kit import (
    ROUNDS,
    Faulty,
    Federation,
    Killed,
    Spread,
    assert_equal_but_for_traffic,
    same_bits,
    state,
)
from torch import Tensor

from fedloom.federation.transport import Call
from fedloom.runs.journal import EVALUATED, Attempt
from fedloom.sums.masks import scale
from fedloom.sums.messages import STEPS, ConfirmationDelivery, Survivors

AT = 2
"""The round that is disturbed, the last."""

MEMBERS = 5
"""Clients of a cohort: four must stay, and each has four neighbours, three of which must stay."""

SUMMED_ALREADY = (Survivors, ConfirmationDelivery)
"""Steps before which the sum of the masked answers is known: a client that fails then is in it."""

SECURE = {"bits": 64, "range": 1000}

Disturbed = Callable[[Call, int], bool]


def disturbed(tiny: Federation, secure: Mapping[str, Any] | None = SECURE, **keys: Any) -> Federation:
    """Return the federation with a cohort of five, measured at the end."""
    keys = {"federation__rounds": AT, "evaluation__every": ROUNDS, **keys}
    return tiny.changed(federation__clients_per_round=MEMBERS, federation__secure_aggregation=secure, **keys)


def training(call: Call) -> bool:
    return call.key.purpose == "train" and call.key.round == AT


def calls_of(tiny: Federation, name: str, *, measured: bool = True) -> list[Call]:
    """Copy a run without a fault, and return the exchanges of the round that is disturbed later."""
    calls = tiny.recorded(name, None if measured else tiny.parts.experiment.federation.rounds)
    return [call for call in calls if training(call)]


def rounds_of(tiny: Federation, name: str) -> list[Attempt]:
    """Return the attempts at rounds; the journal also has evaluations, in which two unseen clients are too few."""
    return [attempt for attempt in tiny.attempts(name) if attempt.outcome != EVALUATED]


def of_sum(calls: Sequence[Call]) -> list[Call]:
    """Return the exchanges of the conversation with secure sums."""
    return [call for call in calls if any(c.key == call.key and isinstance(c.message, STEPS) for c in calls)]


def losing(tiny: Federation, name: str, lose: Disturbed) -> dict[str, Tensor]:
    """Run the last round with lost clients and return the server's state at the end."""
    return state(tiny.disturbed(name, lose, undisturbed=AT - 1, upto=AT))


def at(call: Call, *rows: int, attempt: int = 1) -> Disturbed:
    """Return a predicate that loses these rows at this exchange."""

    def lose(other: Call, row: int) -> bool:
        here = (other.key.conversation, other.exchange) == (call.key.conversation, call.exchange)
        return training(other) and other.key.attempt == attempt and here and row in rows

    return lose


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


def assert_replayed(tiny: Federation, name: str) -> None:
    """Evaluate the last round, the only missing one, and compare with a replay from the beginning."""
    tiny.resume(name)
    tiny.run(f"{name}-replayed", replay=name)
    assert tiny.final(f"{name}-replayed") == tiny.final(name)
    assert tiny.metrics(f"{name}-replayed") == tiny.metrics(name)
    assert rounds_of(tiny, f"{name}-replayed") == rounds_of(tiny, name)


def plain_without(tiny: Federation, calls: Sequence[Call], call: Call, row: int) -> dict[str, Tensor]:
    """Return the state of the run without secure sums that loses a client at the given or the summed exchange."""
    there = call if call in (plain := of_method(calls)) else plain[-1]
    name = f"plain-{there.exchange}-{row}"
    if not (tiny.tmp / name).exists():
        return losing(disturbed(tiny, None), name, at(there, row))
    loop = disturbed(tiny, None).loop(name)
    loop.resume()
    return state(loop)


def assert_lost(tiny: Federation, calls: Sequence[Call], call: Call, row: int) -> None:
    """Lose a client at an exchange: before its masked answer arrives it is excluded from the sum, later it is included.

    The expected state is that of the run without secure aggregation that loses it at the summed exchange.
    """
    secure, name = disturbed(tiny), f"lost-{call.exchange}-{row}"
    found = losing(secure, name, at(call, row))
    (attempt,) = (a for a in rounds_of(secure, name) if a.round == AT)
    lost = [(loss.row, loss.exchange) for loss in attempt.conversations[call.key.conversation].lost]
    assert attempt.outcome == "done"
    if isinstance(call.message, SUMMED_ALREADY):
        assert lost == []
        assert secure.final(name) == secure.final("whole")
        return
    assert lost == [(row, call.exchange)]
    assert_close(found, plain_without(tiny, calls, call, row))


def of_method(calls: Sequence[Call]) -> list[Call]:
    """Return the exchanges of the method itself."""
    return [call for call in calls if not isinstance(call.message, STEPS)]


def test_losing_any_client_at_any_exchange_and_replaying_it(tiny: Federation, every_client: bool) -> None:
    """Other methods than those of ``BY_NAME`` replay one loss, in the next test."""
    calls = of_sum(calls_of(disturbed(tiny), "whole", measured=False))
    assert sum(isinstance(call.message, STEPS) for call in calls) == 5
    for call in calls:
        replayed = call.exchange % MEMBERS
        for row in call.rows if every_client else [replayed]:
            assert_lost(tiny, calls, call, row)
        if every_client:
            assert_replayed(disturbed(tiny), f"lost-{call.exchange}-{replayed}")


def test_secure_sums_equal_plain_sums(tiny: Federation, summed: str) -> None:
    """No client is lost; then one client at a random exchange, the same in every run."""
    secure = disturbed(tiny)
    calls = of_sum(calls_of(secure, "whole", measured=False))
    disturbed(tiny, None).trained("plain")
    again, plain = secure.advance("again"), disturbed(tiny, None).loop("plain")
    plain.resume()
    assert secure.final("again") == secure.final("whole")
    assert_close(state(again), state(plain))
    draw = random.Random(summed)
    call, row = draw.choice(calls), draw.choice(calls[0].rows)
    assert_lost(tiny, calls, call, row)
    assert_replayed(secure, f"lost-{call.exchange}-{row}")


def test_too_few_clients_fail_the_attempt_and_another_cohort_completes_the_round(tiny: Federation, summed: str) -> None:
    """Two of five clients are lost before the sum is known. The failed attempt leaves no trace in the state."""
    secure = disturbed(tiny)
    for call in of_sum(calls_of(secure, "whole", measured=False)):
        if isinstance(call.message, SUMMED_ALREADY):
            continue
        name = f"few-{call.exchange}"
        rows = (1, 3) if isinstance(call.message, STEPS) else (0, 1, 3)  # three ready clients suffice
        secure.recorded(name, upto=AT - 1)
        loop = secure.loop(name, Faulty(secure.transport(name), at(call, *rows)), upto=AT)
        loop.resume()
        before = [state(loop)]
        unchanged: list[bool] = []
        loop.observer.on_round = lambda attempt, loop=loop, before=before: before.append(state(loop))
        loop.observer.on_failure = lambda attempt, loop=loop, before=before, unchanged=unchanged: unchanged.append(
            same_bits(before[-1], state(loop))
        )
        loop.advance()
        assert unchanged == [True]
        made = rounds_of(secure, name)
        assert [(a.round, a.attempt, a.outcome == "done") for a in made] == [(1, 1, True), (2, 1, False), (2, 2, True)]
        secure.advance(f"{name}-replayed", replay=name)
        assert secure.final(f"{name}-replayed") == secure.final(name)
        # Only the second attempt counts for the round: no value of the first is used.
        fresh = disturbed(tiny, None)
        plain = fresh.advance(f"{name}-plain", Faulty(fresh.transport(f"{name}-plain"), everybody_first))
        assert_close(state(loop), state(plain))


def everybody_first(call: Call, row: int) -> bool:
    """Lose all clients of the first attempt."""
    return training(call) and call.key.attempt == 1


def test_a_round_that_fails_after_the_confirmations_is_left_out(tiny: Federation, summed: str) -> None:
    """Members cannot know that there was no sum, and answer over no other set; the next round asks for new answers."""
    last = of_sum(calls_of(disturbed(tiny), "whole", measured=False))[-1]
    longer = disturbed(tiny, federation__rounds=AT + 1)
    longer.run("late", Faulty(longer.transport("late"), at(last, *last.rows)))
    made = [(a.round, a.outcome) for a in rounds_of(longer, "late")]
    assert [round for round, _ in made] == [1, AT, AT, AT + 1]
    assert [outcome for _, outcome in made][::2] == ["done", "burnt"]
    assert made[-1][1] == "done"
    longer.run("late-replayed", replay="late")
    assert longer.final("late-replayed") == longer.final("late")
    assert longer.metrics("late-replayed") == longer.metrics("late")


def test_placement_of_clients_does_not_change_results(tiny: Federation, summed: str) -> None:
    secure = disturbed(tiny)
    secure.recorded("whole")
    everyone = [entry.id for entry in secure.dataset.manifest.clients]
    apart = [frozenset(everyone[i::3]) for i in range(3)]
    secure.run("apart", Spread([secure.transport("apart") for _ in apart], apart))
    assert_equal_but_for_traffic(secure, "apart", "whole")


def test_losing_a_client_of_a_batch_keeps_the_others(tiny: Federation, summed: str) -> None:
    """Serve up to three clients at once: whichever client is lost, sums equal those of one by one up to rounding."""
    if getattr(tiny.parts.experiment.model, "norm", None) == "batch":
        pytest.skip("clients of a model with model.norm: batch are served one by one")
    together = disturbed(tiny, runtime__clients_at_once=3)
    calls = of_sum(calls_of(together, "whole", measured=False))
    for call in calls:
        name = f"lost-{call.exchange}"
        found = losing(together, name, at(call, 1))
        if isinstance(call.message, SUMMED_ALREADY):
            assert together.final(name) == together.final("whole")
        else:
            expected = plain_without(tiny, calls, call, 1)
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_the_error_of_a_secure_mean_is_within_the_stated_bound(tiny: Federation, summed: str) -> None:
    """A client's value is rounded to a step of at most 2 B n
    2^31, so the mean is off by at most half a step.

    Weights are at most the largest client's, so a weighted mean is off by half a step times that weight over the mean
    one. Servers add the mean, or a part of it, to their states. A method that rejects 32 bits uses 64.
    """
    bound, bits = 1000.0, 64 if tiny.parts.algorithm.needs_fine_sums(tiny.parts.settings) else 32
    secure = disturbed(tiny, {"bits": bits, "range": bound}, federation__rounds=1)
    transport = Faulty(secure.transport("masked"))
    masked = secure.advance("masked", transport)
    plain = disturbed(tiny, None, federation__rounds=1).advance("plain")
    clients = next(call.clients for call in transport.calls if call.key.purpose == "train")
    sizes = [secure.dataset.manifest.entry(client).train for client in clients]
    half_a_step = 0.5 / scale(bound, MEMBERS, bits)
    assert half_a_step <= bound * MEMBERS / 2 ** (bits - 1)
    allowed = half_a_step * max(sizes) * MEMBERS / sum(sizes)
    expected = state(plain)
    for name, found in state(masked).items():
        if found.is_floating_point():
            float32 = 8 * torch.finfo(torch.float32).eps * expected[name].abs().max().item()
            assert (found - expected[name]).abs().max().item() <= allowed + float32, name


# --- kill and resume --------------------------------------------------------------------------------------------------


def test_resuming_after_a_kill_at_any_exchange(tiny: Federation, summed: str) -> None:
    """The attempt is lost with the aggregator, and its received answers are useless; the round is repeated."""
    secure = disturbed(tiny)
    calls = calls_of(secure, "whole")
    for i, killed in enumerate(calls):
        name = f"killed-{i}"

        def kill(call: Call, killed: Call = killed) -> None:
            if training(call) and (call.key, call.exchange) == (killed.key, killed.exchange):
                raise Killed

        with pytest.raises(Killed):
            secure.run(name, Faulty(secure.transport(name), before=kill))
        secure.resume(name)
        assert secure.final(name) == secure.final("whole")
        assert secure.metrics(name) == secure.metrics("whole")
        assert rounds_of(secure, name) == rounds_of(secure, "whole")
