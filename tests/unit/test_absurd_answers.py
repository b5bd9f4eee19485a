"""Well-formed but implausible answers: they lose their client, and never the run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from federations import Federation, clients, federation, setup, variant
from torch import Tensor

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, Conversation
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings, Update
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.pefll import PEFLL, PeFLLSettings
from fedloom.core.words import REASON_CHARACTERS
from fedloom.errors import QuorumError
from fedloom.evaluation.measure import implausible
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.transport import Traffic
from fedloom.federation.validation import learning_rates, out_of_range
from fedloom.messages import COUNT_LIMIT, LOSS_LIMIT, VALUE_LIMIT, Message, Metrics

D = setup().model.layout.size
LIAR = "c1"
Lie = Callable[[Message], Message]


def lying(algorithm: Algorithm, lie: Lie, *who: str) -> Algorithm:
    """Return the method with clients whose training answers a function changes."""

    def client(settings: Any, problem: Any) -> ClientAlgorithm:
        half = algorithm.client(settings, problem)
        honestly = half.open

        def tell(group: ClientGroup, opening: Message) -> Conversation:
            honest, reported = honestly(group, opening), None
            while True:
                try:
                    answer = honest.send(reported)
                except StopIteration as end:
                    return end.value
                reported = yield lie(answer) if group.clients[0].id in (who or (LIAR,)) else answer

        half.open = tell  # type: ignore[method-assign]
        return half

    return variant(algorithm, client=client)


def fedavg(folder: Path, lie: Lie, *who: str, **kwargs: Any) -> Federation:
    settings = FedAvgSettings(local=LocalSGD(steps=2, batch_size=2, clip=5.0))
    return federation(folder, lying(FEDAVG, lie, *who), settings, setup(), clients([4, 5, 6]), **kwargs)


PLAN = EvaluationPlan.of_classes(3)


def changed(**fields: float) -> Lie:
    return lambda answer: dataclasses.replace(
        answer, **{name: torch.full_like(getattr(answer, name), value) for name, value in fields.items()}
    )


def instead(_: Message) -> Message:
    return PLAN.nothing(1, 2)


LIES: dict[str, tuple[Lie, str]] = {
    "metrics": (instead, "Metrics"),
    "steps beyond all sums": (changed(steps=1.7e308), "steps"),
    "steps beyond all reason": (changed(steps=2 * COUNT_LIMIT), "steps"),
    "half a step": (changed(steps=0.5), "steps"),
    "steps back": (changed(steps=-1.0), "steps"),
    "loss": (changed(loss=1.7e308), "loss"),
    "negative loss": (changed(loss=-2 * LOSS_LIMIT), "loss"),
    "a step more than the settings ask for": (changed(steps=3.0), "whole numbers from 0 to 2"),
    "update": (changed(delta_theta=3.4e38), "delta_theta"),
    "update beyond what clipped steps can do": (changed(delta_theta=10.0), "has norm"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_client_with_invalid_replies_is_lost_and_the_run_continues(tmp_path: Path, name: str) -> None:
    lie, output = LIES[name]
    f = fedavg(tmp_path / "a", lie, rounds=3)
    f.run()
    for attempt in f.loop.journal.attempts:
        (loss,) = attempt.conversations[0].lost
        assert (loss.client, loss.exchange) == (LIAR, 0)
        assert output in loss.reason
        assert sum(attempt.refused.values()) == 1
    lines = (tmp_path / "a" / "journal.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    honest = fedavg(tmp_path / "b", lie, "nobody", rounds=3, lost={0: 1})
    honest.run()
    assert all(torch.equal(mine, f.state[key]) for key, mine in honest.state.items())
    again = fedavg(tmp_path / "a", lie, rounds=5)
    again.loop.resume()
    again.run()
    assert again.loop.round == 5


@pytest.mark.parametrize("name", LIES)
def test_a_majority_of_invalid_replies_changes_nothing(tmp_path: Path, name: str) -> None:
    lie, output = LIES[name]
    f = fedavg(tmp_path, lie, "c0", "c1", rounds=2)
    f.run()
    for attempt in f.loop.journal.attempts:
        assert [loss.client for loss in attempt.conversations[0].lost] == ["c0", "c1"]
        assert all(output in loss.reason for loss in attempt.conversations[0].lost)


def test_a_message_of_another_exchange_is_rejected(tmp_path: Path) -> None:
    """Send PeFLL's second answer in reply to its first request."""
    settings = PeFLLSettings(local=LocalSGD(steps=1, batch_size=2))

    def lie(answer: Message) -> Message:
        one = torch.ones(1, 1, dtype=torch.float64)
        return Update(torch.zeros(1, D).double(), one, one)

    f = federation(tmp_path, lying(PEFLL, lie), settings, setup(), clients([4, 5, 6]), rounds=1)
    f.run()
    (loss,) = f.loop.journal.attempts[0].conversations[0].lost
    assert (loss.client, loss.exchange) == (LIAR, 0)
    assert "Descriptor" in loss.reason


def measured(change: Callable[[dict[str, Tensor]], None]) -> Metrics:
    """Return altered metrics of one predictor of a client with 3 validation and 2 test examples."""
    tensors = {name: tensor.clone() for name, tensor in PLAN.nothing(1, 1).tensors().items()}
    tensors["counts"][0, 0, :, :, 0], tensors["counts"][0, 0, :, :, 2] = 1, 2.5
    tensors["counts"][0, 0, 0, :, 1], tensors["counts"][0, 0, 1, :, 1] = 3, 2
    tensors["confusion"][0, 0, 1, 1] = tensors["confusion"][0, 0, 2, 1] = 1
    tensors["calibration"][0, 0, 9] = torch.tensor([2.0, 1.3, 1.0])
    tensors["uncertainty"][0, 0] = torch.tensor([2.0, 1.1, 0.0])
    change(tensors)
    return Metrics(**tensors)


def put(field: str, *where: int, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[field][(0, 0, *where)] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("counts", 1, 0, 0, value=3),  # three right predictions of two examples
        put("counts", 1, 0, 0, value=0.5),
        put("counts", 1, 0, 0, value=-1),
        put("counts", 1, 0, 1, value=1.7e308),
        put("counts", 1, 0, 1, value=1),  # of the two examples
        put("counts", 0, 1, 2, value=1e308),
        put("counts", 0, 1, 2, value=-1),
        put("confusion", 0, 0, value=-1),
        put("confusion", 0, 0, value=2**62),
        put("confusion", 0, 0, value=1),
        put("calibration", 3, 0, value=1e308),
        put("calibration", 3, 0, value=1),
        put("calibration", 9, 1, value=2.1),
        put("calibration", 9, 2, value=3),
        put("uncertainty", 0, value=1.7e308),
        put("uncertainty", 1, value=1.7e308),
        put("uncertainty", 2, value=-5),
    ],
)
def test_impossible_measurements_are_rejected(change: Callable[[dict[str, Tensor]], None]) -> None:
    assert implausible(measured(lambda tensors: None), PLAN, validation=3, test=2) is None
    assert implausible(PLAN.nothing(1, 1), PLAN, validation=3, test=2) is None
    assert implausible(measured(change), PLAN, validation=3, test=2)


def test_an_invalid_measurement_is_left_out_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.evaluation import measure

    honest = measure._measure

    def lie(predictor: Any, client: Any, *rest: Any) -> Any:
        found = honest(predictor, client, *rest)
        if client.id == LIAR:
            found.counts[...] = 1.7e308
        return found

    monkeypatch.setattr(measure, "_measure", lie)
    f = fedavg(tmp_path, instead, "nobody", rounds=1)
    evaluation = f.run()
    assert evaluation.present.tolist() == [True, False, True]
    (line,) = (line for line in f.loop.folder.lines("metrics.jsonl") if line["round"] == 1)
    assert line["left_out"] == {"absent": 1, "untested": 0}
    assert {a.outcome for a in f.loop.journal.attempts} == {"done", "evaluated"}


def test_values_at_the_limits_are_accepted() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    good = Update(torch.full((1, 2), VALUE_LIMIT), COUNT_LIMIT * one, -LOSS_LIMIT * one)
    assert out_of_range(good, {}) is None
    assert out_of_range(dataclasses.replace(good, loss=math.nextafter(LOSS_LIMIT, math.inf) * one), {})
    assert out_of_range(dataclasses.replace(good, steps=(COUNT_LIMIT + 1) * one), {})


@pytest.mark.parametrize("error", [AttributeError, OverflowError, ValueError, RuntimeError, KeyError])
def test_a_server_error_about_replies_fails_the_attempt(
    tmp_path: Path, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    f = fedavg(tmp_path, instead, "nobody", rounds=2)
    f.loop.schedule = dataclasses.replace(f.loop.schedule, attempts=3)
    f.run()
    f = fedavg(tmp_path, instead, "nobody", rounds=4)
    f.loop.schedule = dataclasses.replace(f.loop.schedule, attempts=3)
    f.loop.resume()
    f.loop.transport.traffic = Traffic(0, 0)  # as of remote clients
    before, honestly = f.state, f.loop.server.train_round

    def broken(round: Any) -> Any:
        f.loop.server.state["theta"] = honestly(round) and torch.zeros(1)
        raise error("of what a client said")

    f.loop.server.train_round = broken  # type: ignore[method-assign]
    with pytest.raises(QuorumError, match="of what a client said"):
        f.run()
    assert all(torch.equal(mine, f.state[key]) for key, mine in before.items())
    failed = [a for a in f.loop.journal.attempts if a.outcome not in ("done", "evaluated")]
    assert [a.attempt for a in failed] == [1, 2, 3]
    assert all(error.__name__ in a.outcome and "test_absurd_answers.py" in a.outcome for a in failed)
    assert sum("Traceback" in (r.exc_text or "") or r.exc_info is not None for r in caplog.records) >= 3
    again = fedavg(tmp_path, instead, "nobody", rounds=4)
    again.loop.resume()
    again.run()
    assert again.loop.round == 4


def test_transport_errors_remain_bugs(tmp_path: Path) -> None:
    f = fedavg(tmp_path, instead, "nobody", rounds=1)
    f.run()
    f = fedavg(tmp_path, instead, "nobody", rounds=2)
    f.loop.resume()

    def broken(call: Any) -> Any:
        raise ValueError("ours")

    f.loop.transport.exchange = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="ours"):
        f.run()


def test_non_finite_statistics_are_never_written(tmp_path: Path) -> None:
    f = fedavg(tmp_path, instead, "nobody", rounds=1)
    honestly = f.loop.server.train_round
    f.loop.server.train_round = lambda round: honestly(round) | {"loss": math.inf}  # type: ignore[method-assign]
    with pytest.raises(QuorumError, match=r"\bloss\b"):
        f.run()
    (attempt,) = f.loop.journal.attempts
    assert not attempt.statistics
    assert not f.loop.checkpoints.rounds() or f.loop.checkpoints.rounds() == [0]


def test_a_clients_reason_is_one_line_and_truncated(tmp_path: Path) -> None:
    def lie(answer: Message) -> Message:
        raise FloatingPointError("\u2028\x1b[2J\u202e\x85" * 1000)

    f = fedavg(tmp_path, lie, rounds=2)
    f.run()
    for line in (tmp_path / "journal.jsonl").read_text().splitlines():
        (loss,) = json.loads(line)["conversations"][0]["lost"]
        assert loss["reason"].isprintable()
        assert len(loss["reason"]) <= REASON_CHARACTERS
    again = fedavg(tmp_path, lie, rounds=3)
    again.loop.resume()
    again.run()
    assert again.loop.round == 3


def test_a_state_corrupted_in_place_never_reaches_a_checkpoint(tmp_path: Path) -> None:
    """Keep the durable state of a method that changes its tensors in place without a check."""
    f = fedavg(tmp_path, instead, "nobody", rounds=3)
    f.run()
    durable = f.state
    f = fedavg(tmp_path, instead, "nobody", rounds=4)
    f.loop.resume()

    def poisoned(round: Any) -> Any:
        f.loop.server.state["theta"][0] = math.inf
        return {"client_steps": 0.0}

    f.loop.server.train_round = poisoned  # type: ignore[method-assign]
    with pytest.raises(QuorumError, match=r"theta.*finite"):
        f.run()
    again = fedavg(tmp_path, instead, "nobody", rounds=4)
    again.loop.resume()
    assert again.loop.round == 3
    assert all(torch.equal(mine, again.state[key]) for key, mine in durable.items())
    assert again.loop.best.round <= 3
    again.run()


@pytest.mark.slow
def test_refusals_counted_during_a_journal_write_are_safe(tmp_path: Path) -> None:
    """The wire counts in another thread: here, at every comparison of a number."""

    class Counted(int):
        def __gt__(self, other: object) -> bool:
            counts[f"refusal {len(counts)}"] = 1
            return int(self) > int(other)  # type: ignore[call-overload]

        def __sub__(self, other: int) -> int:
            return int(self) - other

    f = fedavg(tmp_path, instead, "nobody", rounds=1)
    counts = f.loop.transport.refusals.counts
    counts["late"] = Counted(0)
    f.run()
    assert len(counts) > 1
    assert f.loop.round == 1


def test_finite_divergence_is_reported_with_the_bound_and_the_key_to_lower(tmp_path: Path) -> None:
    f = fedavg(tmp_path, changed(delta_theta=1e13), rounds=1)
    f.run()
    (loss,) = f.loop.journal.attempts[0].conversations[0].lost
    assert loss.client == LIAR
    facts = "2 local steps", "Update.delta_theta", "1e+13", "±1e+12", "algorithm.local.lr (now 0.01)"
    assert tells(loss.reason, "diverged", *facts), loss.reason
    assert "server_lr" in loss.reason


def test_a_state_that_is_not_finite_is_reported_with_the_keys_to_lower(tmp_path: Path) -> None:
    settings = FedAvgSettings(local=LocalSGD(steps=2, batch_size=2), server_lr=1e305, max_norm=1e9)
    algorithm = lying(FEDAVG, changed(delta_theta=1e11))
    f = federation(tmp_path, algorithm, settings, setup(), clients([4, 5, 6]), rounds=1)
    with pytest.raises(QuorumError) as error:
        f.run()
    assert tells(str(error.value), "theta", "algorithm.server_lr (now 1e+305)", "algorithm.max_norm (now 1e+09)")


def test_learning_rates_of_a_method_are_named_by_their_keys() -> None:
    settings = PeFLLSettings(local=LocalSGD(lr=0.5, steps=1))
    assert learning_rates(settings)["algorithm.local.lr"] == 0.5
    assert set(learning_rates(settings)) == {"algorithm.local.lr", "algorithm.server.lr"}
