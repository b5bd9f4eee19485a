"""Results of a new client's local steps: ``evaluation.own_steps``, and research/own_steps.py."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import own_steps
import pytest
import torch
from facts import telling
from vowel_runs import on_vowels

from fedloom import experiment as experiments
from fedloom.algorithms.base import available, find_algorithm
from fedloom.engine.assemble import make_parts
from fedloom.engine.results import conclude
from fedloom.engine.trained import evaluate
from fedloom.errors import ExperimentError
from fedloom.federation.client_side import after_steps_purpose
from fedloom.federation.transport import Call, ConversationKey, Lost

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "local": {"steps": 2, "lr": 0.1}},
    "pefll": {
        "name": "pefll",
        "local": {"steps": 2, "lr": 0.1},
        "embedding": {"network": "mlp"},
        "hypernetwork": {"size": "S"},
    },
}


def test_written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_vowels(tmp_path / "run", {"name": "local", "local": {"steps": 2}}, rounds=0)
    run.run()
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["own_steps", str(run.folder.path), "--steps", "0,1,2", "--out", str(out)])
    own_steps.main()
    rows = list(csv.DictReader((out / "own-steps.csv").read_text().splitlines()))
    assert [(row["method"], row["steps"]) for row in rows] == [("local", "1"), ("local", "2")]
    assert "svg" in (out / "own-steps.svg").read_text()
    other = on_vowels(tmp_path / "other", {"name": "fedper"})
    other.run()
    with pytest.raises(SystemExit, match="local, fedavg, pefll"):
        own_steps.measured(other.folder.path, 1, [])


@pytest.mark.slow
def test_only_the_best_step_size_on_validation_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_vowels(tmp_path / "run", {"name": "local", "local": {"steps": 2}}, rounds=0)
    run.run()
    out = tmp_path / "out"
    asked = ["own_steps", str(run.folder.path), "--steps", "50", "--rates", "0.0001,0.1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", asked)
    own_steps.main()
    rows = list(csv.DictReader((out / "own-steps.csv").read_text().splitlines()))
    validation = {row["rate"]: float(row["validation"]) for row in rows}
    best = max(validation, key=lambda rate: validation[rate])
    assert validation["0.0001"] != validation["0.1"]
    assert {row["rate"] for row in rows if row["mean"]} == {best}


def test_rates_are_compared_by_the_mean_and_diverged_ones_excluded() -> None:
    def line(seed: int, rate: float, validation: float) -> own_steps.Measured:
        return own_steps.Measured("fedavg", seed, 5, rate, 3, validation, 0.5, 0.4, None)

    lines = [line(1, 0.1, 0.9), line(2, 0.1, 0.5), line(1, 0.2, 0.8), line(2, 0.2, 0.8), line(1, 0.4, 1.0)]
    assert [each.rate for each in own_steps.by_validation(lines) if each.mean is not None] == [0.2, 0.2]


# --- evaluation.own_steps ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_own_steps_in_a_run_or_after_it_equal_those_of_a_run_with_that_number(tmp_path: Path, method: str) -> None:
    run = on_vowels(tmp_path / "run", METHODS[method], own_steps=[0, 3])
    final = run.run()
    plain = on_vowels(tmp_path / "plain", METHODS[method])
    assert torch.equal(final.counts, plain.run().counts)
    assert run.personalization_payload == plain.personalization_payload
    assert list(run.after_steps) == [0, 3]
    later = {line.steps: line for k in (0, 3) for line in own_steps.measured(plain.folder.path, k, [])}
    for k, found in run.after_steps.items():
        tuned = on_vowels(tmp_path / f"tuned-{k}", METHODS[method] | {"personalize_steps": k})
        expected = tuned.run()
        unseen = ~expected.seen
        assert found.clients == tuple(c for c, new in zip(expected.clients, unseen.tolist(), strict=True) if new)
        assert torch.equal(found.counts, expected.counts[unseen])
        assert found.present.all()
        statistics = evaluate(tuned.folder.path).statistics["unseen"]
        assert (later[k].mean, later[k].clients) == (statistics["accuracy_mean"], statistics["clients"])
    assert later[0].mean != later[3].mean
    assert not torch.equal(run.after_steps[0].counts, run.after_steps[3].counts)


def test_a_summary_lists_unseen_clients_by_steps(tmp_path: Path) -> None:
    run = on_vowels(tmp_path, {"name": "local", "local": {"steps": 2}}, rounds=0, own_steps=[0, 2])
    final = run.run()
    summary = conclude(_parts(run), run, final, 1.0)
    assert [line["steps"] for line in summary["own_steps"]] == [0, 2]
    assert summary["own_steps"][1]["unseen"] == summary["unseen"]  # it trains with as many steps
    untrained = summary["own_steps"][0]["unseen"]
    assert untrained["loss_mean"] != summary["unseen"]["loss_mean"]
    none = on_vowels(tmp_path / "none", {"name": "local", "local": {"steps": 2}}, rounds=0)
    assert conclude(_parts(none), none, none.run(), 1.0)["own_steps"] is None


def _parts(run: Any) -> Any:
    return make_parts(experiments.load_experiment(run.folder.path / "experiment.yaml"), run.manifest)


def test_steps_not_named_by_the_experiment_are_rejected(tmp_path: Path) -> None:
    run = on_vowels(tmp_path, METHODS["fedavg"], own_steps=[0, 3])
    run.run()
    client = run.manifest.unseen[0]
    opening = run.server.personalize  # the opening message is the server's: caught as it is sent
    sent: list[Any] = []

    class Catching:
        clients = (client,)

        def send(self, message: Any, *rest: Any) -> Any:
            sent.append(message)
            raise StopIteration

        def record(self, name: str, values: Any) -> None: ...

    with pytest.raises(StopIteration):
        opening(Catching())
    for steps, answered in ((3, True), (4, False)):
        key = ConversationKey(run.round, 0, steps, after_steps_purpose(steps))
        (answer,) = run.transport.exchange(Call(key, 0, (0,), (client,), sent[0], run._config.shapes))
        assert isinstance(answer, Lost) != answered
        if isinstance(answer, Lost):
            assert "'evaluate/4'" in answer.reason
            assert "evaluation.own_steps" in answer.reason


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", available())
def test_every_method_has_own_steps_or_names_methods_that_do(name: str) -> None:
    algorithm = find_algorithm(name)
    settings = algorithm.settings()
    if algorithm.has_steps:
        assert algorithm.after_steps(settings, 7) != algorithm.after_steps(settings, 0)
    else:
        with pytest.raises(ExperimentError, match=rf"{name}.*null.*fedavg") as refused:
            algorithm.after_steps(settings, 7)
        assert refused.value.key == "evaluation.own_steps"
        assert "fedavg" in (refused.value.allowed or ())
        assert name not in (refused.value.allowed or ())


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        (["evaluation.own_steps=[]"], ["1", "[]"]),
        (["evaluation.own_steps=[0, -1]"], ["0", "-1"]),
        (["evaluation.own_steps=[5, 1]"], ["[5, 1]"]),
        (["evaluation.own_steps=[1, 1]"], ["[1, 1]"]),
        (["evaluation.own_steps=[1]", "data.held_out_fraction=0"], ["held_out_fraction", "0"]),
        (["evaluation.own_steps=[1]", "algorithm={name: fedrep}"], ["fedrep", "null"]),
    ],
)
def test_invalid_own_steps_are_rejected(changes: list[str], output: list[str]) -> None:
    with telling(ExperimentError, "evaluation.own_steps", *output):
        experiments.load_experiment(Path(__file__).parents[2] / "experiments" / "quickstart.yaml", changes)
