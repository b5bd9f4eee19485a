"""Statistics over clients, against numpy; the exact keys of DESIGN §7."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.words import as_csv
from fedloom.data.manifest import ClientEntry
from fedloom.evaluation.documents import calibration_document, client_rows, confusion_document
from fedloom.evaluation.group_statistics import calibration_of_clients, group_statistics, groups, uncertainties
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.evaluation.summary import (
    Communication,
    RunCost,
    RunDescription,
    best,
    late,
    left_out,
    metrics_line,
    summary,
    validation_pooled,
)
from fedloom.evaluation.uncertainty import BINS, group_uncertainty
from fedloom.tasks.classification import calibration_errors

KEYS = {
    "clients",
    "accuracy_mean",
    "accuracy_std",
    "accuracy_worst",
    "accuracy_worst_decile",
    "accuracy_pooled",
    "loss_mean",
}
TRAFFIC = Communication(payload_up=1000, payload_down=2000)


def evaluation(n: int = 6, predictors: tuple[str, ...] = ("personal", "global"), round: int = 3) -> EvaluationResult:
    generator = torch.Generator().manual_seed(n)
    total = torch.randint(5, 30, (n, 1, 2, 1), generator=generator).double().expand(n, len(predictors), 2, 2)
    correct = (torch.rand(total.shape, generator=generator).double() * total).floor()
    counts = torch.stack([correct, total, torch.rand(total.shape, generator=generator).double() * total], dim=-1)
    seen = torch.arange(n) < n - n // 3
    ids = tuple(f"client-{i:04d}" for i in range(n))
    confusion = torch.randint(9, (n, len(predictors), 3, 3), generator=generator)
    calibration = torch.rand(n, len(predictors), BINS, 3, generator=generator).double()
    calibration[..., 0] = (9 * calibration[..., 0]).floor()
    calibration *= calibration[..., :1] > 0
    uncertainty = torch.rand(n, len(predictors), 3, generator=generator).double()
    uncertainty[..., 0] = calibration[..., 0].sum(-1)
    present = torch.ones(n, dtype=torch.bool)
    plan = EvaluationPlan.of_classes(3)
    sums = torch.rand(n, len(predictors), 2, plan.size, generator=generator).double()
    return EvaluationResult(
        round, ids, seen, present, predictors, counts, confusion, calibration, uncertainty, sums, plan
    )


def altered(e: EvaluationResult, **changes: Any) -> EvaluationResult:
    return dataclasses.replace(e, **changes)


counts = st.lists(
    st.integers(0, 50).flatmap(lambda t: st.tuples(st.integers(0, t), st.just(t), st.floats(0, 1e6))), max_size=40
)


@settings(max_examples=60)
@given(counts)
def test_group_statistics_against_numpy(rows: list[tuple[int, int, float]]) -> None:
    given_ = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    found = group_statistics(given_)
    tested = [row for row in rows if row[1]]
    if not tested:
        assert found is None
        return
    accuracy = np.array([c / t for c, t, _ in tested])
    expected = {
        "clients": len(tested),
        "accuracy_mean": accuracy.mean(),
        "accuracy_std": accuracy.std(),
        "accuracy_worst": accuracy.min(),
        "accuracy_worst_decile": np.sort(accuracy)[: math.ceil(len(tested) / 10)].mean(),
        "accuracy_pooled": sum(c for c, _, _ in tested) / sum(t for _, t, _ in tested),
        "loss_mean": np.mean([loss / t for _, t, loss in tested]),
    }
    assert found is not None
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert set(found) == KEYS
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (10, 1), (11, 2), (90, 9), (91, 10)])
def test_worst_decile_is_the_mean_of_the_worst_tenth_rounded_up(n: int, size: int) -> None:
    rows = torch.tensor([[i, 100, 0] for i in range(n)], dtype=torch.float64)
    found = group_statistics(rows.flip(0))
    assert found["accuracy_worst_decile"] == pytest.approx(sum(range(size)) / size / 100)


def test_groups_have_both_accuracies_and_a_separate_global_predictor() -> None:
    e = evaluation()
    for label_mask, main, other in ((False, "unmasked", "masked"), (True, "masked", "unmasked")):
        found = groups(e, label_mask=label_mask)
        assert list(found) == ["seen", "unseen", "global"]
        for group, predictor, rows in (
            (found["seen"], "personal", e.seen),
            (found["unseen"], "personal", ~e.seen),
            (found["global"], "global", torch.ones(6, dtype=torch.bool)),
            (found["global"]["seen"], "global", e.seen),
            (found["global"]["unseen"], "global", ~e.seen),
        ):
            assert KEYS | {other} <= set(group)
            assert main not in group
            expected = group_statistics(e.of(predictor, "test", main)[rows])
            assert {k: group[k] for k in KEYS} == expected
            assert group[other] == group_statistics(e.of(predictor, "test", other)[rows])


def test_undefined_statistics_are_null() -> None:
    e = evaluation(predictors=("personal",))
    assert groups(e, label_mask=False)["global"] is None
    everyone_seen = altered(e, seen=torch.ones(6, dtype=torch.bool))
    assert groups(everyone_seen, label_mask=False)["unseen"] is None
    no_mask = e.counts.clone()
    no_mask[:, :, :, 1] = 0
    assert groups(altered(e, counts=no_mask), label_mask=False)["seen"]["masked"] is None
    no_validation = e.counts.clone()
    no_validation[:, :, 0] = 0
    assert validation_pooled(altered(e, counts=no_validation), label_mask=False) is None


def test_absent_and_untested_clients_are_counted_and_left_out() -> None:
    e = evaluation()
    changed = e.counts.clone()
    changed[1] = 0
    present = torch.tensor([False, True, True, True, True, True])
    e = altered(e, present=present, counts=changed)
    assert left_out(e, label_mask=False) == {"absent": 1, "untested": 1}
    assert groups(e, label_mask=False)["seen"]["clients"] == 2
    assert validation_pooled(e, label_mask=False) == pytest.approx(
        float(changed[2:4, 0, 0, 0, 0].sum() / changed[2:4, 0, 0, 0, 1].sum())
    )
    nobody = altered(e, present=torch.zeros(6, dtype=torch.bool))
    assert groups(nobody, label_mask=False) == {"seen": None, "unseen": None, "global": None}


def test_the_best_round_is_the_earliest_of_the_highest_validation() -> None:
    lines = [
        {"round": r, "validation_pooled": v, "seen": {"r": r}, "unseen": None, "global": None}
        for r, v in [(0, 0.1), (50, 0.9), (100, 0.9), (150, None), (25, 0.9)]
    ]
    assert best(lines) == {"round": 25, "seen": {"r": 25}, "unseen": None, "global": None}
    assert best(lines[3:4]) is None
    assert best([]) is None


def line(e: EvaluationResult) -> dict[str, Any]:
    return metrics_line(
        e,
        label_mask=False,
        train_loss=0.5,
        communication=TRAFFIC,
        client_steps=250,
        extra={"pefll": {"spearman": {"mean": 0.5}}},
    )


def test_metrics_line_is_json() -> None:
    found = line(evaluation())
    assert list(found) == [
        "round",
        "seen",
        "unseen",
        "global",
        "uncertainty",
        "spread",
        "validation_pooled",
        "validation_loss",
        "task",
        "headline",
        "left_out",
        "train",
        "communication",
        "client_steps",
        "pefll",
    ]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    with pytest.raises(ValueError, match="'seen'"):
        metrics_line(
            evaluation(), label_mask=False, train_loss=None, communication=TRAFFIC, client_steps=0, extra={"seen": {}}
        )


def test_summary_has_the_keys_of_the_design() -> None:
    e = evaluation()
    about = RunDescription("quickstart", "pefll", "fashion-mnist", "lenet", 1)
    cost = RunCost(3, 2, TRAFFIC, duration_s=12.5, client_steps=600, training_s=2.0)
    found = summary(e, [line(e)], about, cost, label_mask=False, extra={"pefll": {"spearman": 0.5}})
    assert list(found) == [
        "name",
        "algorithm",
        "titles",
        "dataset",
        "model",
        "task",
        "headline",
        "metrics",
        "seed",
        "rounds",
        "clients_per_round",
        "seen",
        "unseen",
        "global",
        "own_steps",
        "best",
        "last_evaluations",
        "uncertainty",
        "spread",
        "communication",
        "duration_s",
        "client_steps_per_s",
        "pefll",
    ]
    assert found["client_steps_per_s"] == 300
    assert found["last_evaluations"] is None
    assert found["best"]["round"] == 3
    assert found["best"]["seen"] == found["seen"]
    assert found["communication"] == {"payload_up": 1000, "payload_down": 2000, "wire_up": None, "wire_down": None}
    untrained = summary(e, [], about, replace(cost, client_steps=0, training_s=0.0), label_mask=False)
    assert untrained["client_steps_per_s"] is None
    assert untrained["best"] is None


def test_the_last_evaluations_are_summarized() -> None:
    rounds = {0: 0.1, 50: 0.5, 100: 0.875, 150: 0.625}
    lines: list[dict[str, Any]] = [
        {
            "round": t,
            "seen": {"accuracy_mean": value, "accuracy_pooled": value / 2, "loss_mean": 1.0},
            "unseen": None if t == 50 else {"accuracy_mean": value, "accuracy_pooled": value, "loss_mean": 1.0},
            "global": None,
        }
        for t, value in rounds.items()
    ]
    found = late(lines)
    assert (found["evaluations"], found["rounds"]) == (3, [50, 150])  # without the evaluation before training
    assert found["seen"] == {
        "accuracy_mean": {"mean": pytest.approx(2 / 3), "lowest": 0.5, "highest": 0.875},
        "accuracy_pooled": {"mean": pytest.approx(1 / 3), "lowest": 0.25, "highest": 0.4375},
    }
    assert found["unseen"] is found["global"] is None
    alone = late(lines[:1])
    assert alone["seen"]["accuracy_mean"] == {"mean": 0.1, "lowest": 0.1, "highest": 0.1}
    losses = [
        {**one, "seen": {"accuracy_mean": None, "accuracy_pooled": None, "loss_mean": t}} for t, one in enumerate(lines)
    ]
    of_losses = late(losses)
    assert of_losses["seen"] == {"loss_mean": {"mean": 2.0, "lowest": 1, "highest": 3}}
    assert late([]) is None


def entry(id: str, seen: bool) -> ClientEntry:
    counts = {"train": (4, 0, 6), "validation": (1, 0, 1), "test": (2, 0, 3)}
    return ClientEntry(id, seen, 10, 2, 5, counts, "0" * 64)


def test_client_rows_and_csv() -> None:
    e = evaluation(3)
    changed = e.counts.clone()
    changed[1, :, :, 1] = 0
    e = altered(e, counts=changed)
    rows = client_rows(e, [entry(id, bool(seen)) for id, seen in zip(e.clients, e.seen, strict=True)])
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert read == rows
    assert read[0]["labels"] == "0 2"
    assert read[0]["owner"] == ""
    assert [row["seen"] for row in read] == ["true", "true", "false"]
    assert read[1]["personal_accuracy_masked"] == ""
    correct, total, loss = e.of("global", "test", "unmasked")[2].tolist()
    assert float(read[2]["global_accuracy_unmasked"]) == pytest.approx(correct / total, abs=1e-6)
    assert float(read[2]["global_loss_unmasked"]) == pytest.approx(loss / total, abs=1e-6)
    assert as_csv([]) == ""


def test_shapes_are_checked() -> None:
    e = evaluation()
    with pytest.raises(ValueError, match=r"counts .*\(6, 1, 2, 2, 3\)"):
        altered(e, predictors=("personal",))
    with pytest.raises(ValueError, match=r"predictors .*personal"):
        altered(e, predictors=("mine", "global"))
    with pytest.raises(ValueError, match="record 'v'"):
        altered(e, records={"v": torch.zeros(2, 3)})


def test_confusion_sums_the_clients_of_each_group_that_answered() -> None:
    e = evaluation(6)
    present = torch.tensor([True, False, True, True, True, True])
    document = confusion_document(altered(e, present=present), ["a", "b", "c"])
    assert document["round"] == 3
    assert document["classes"] == ["a", "b", "c"]
    assert document["personal"]["seen"] == (e.confusion[0, 0] + e.confusion[2, 0] + e.confusion[3, 0]).tolist()
    assert document["global"]["unseen"] == (e.confusion[4, 1] + e.confusion[5, 1]).tolist()
    nobody = confusion_document(altered(e, seen=torch.ones(6, dtype=torch.bool)), ["a", "b", "c"])
    assert nobody["personal"]["unseen"] is None
    assert confusion_document(evaluation(6, ("personal",)), ["a", "b", "c"])["global"] is None


def test_uncertainty_is_over_all_examples_of_the_clients_of_each_group_that_answered() -> None:
    present = torch.tensor([True, False, True, True, True, True])
    e = altered(evaluation(6), present=present)
    for name, rows, p in (("seen", [0, 2, 3], 0), ("unseen", [4, 5], 0), ("global", [0, 2, 3, 4, 5], 1)):
        bins = sum(e.calibration[i, p].numpy() for i in rows)
        n = bins[:, 0].sum()
        expected = {
            "ece": sum(size / n * abs(right / size - confidence / size) for size, confidence, right in bins if size),
            "entropy": sum(float(e.uncertainty[i, p, 1]) for i in rows) / n,
            "mutual_information": sum(float(e.uncertainty[i, p, 2]) for i in rows) / n,
        }
        assert uncertainties(e)[name] == pytest.approx(expected)
    alone = evaluation(6, ("personal",))
    assert uncertainties(alone)["global"] is None
    nobody = altered(e, present=torch.zeros(6, dtype=torch.bool))
    assert uncertainties(nobody) == {"seen": None, "unseen": None, "global": None}


def test_clients_calibration_errors_are_computed_per_client() -> None:
    present = torch.tensor([True, False, True, True, True, True])
    e = altered(evaluation(6), present=present)

    def alone(i: int, p: int) -> float:
        bins = e.calibration[i, p].tolist()
        return sum(abs(right - confidence) for _, confidence, right in bins) / sum(size for size, _, _ in bins)

    for name, rows, p in (("seen", [0, 2, 3], 0), ("unseen", [4, 5], 0), ("global", [0, 2, 3, 4, 5], 1)):
        each = [alone(i, p) for i in rows]
        assert calibration_of_clients(e, name) == pytest.approx(sum(each) / len(each))
        sizes = [float(e.calibration[i, p, :, 0].sum()) for i in rows]
        together = uncertainties(e)[name]
        assert together["ece"] <= sum(n * error for n, error in zip(sizes, each, strict=True)) / sum(sizes) + 1e-12
    # One is as overconfident as the other is underconfident: calibrated together, but not separately.
    two = torch.zeros(2, 15, 3, dtype=torch.float64)
    two[0, 10], two[1, 10] = torch.tensor([10.0, 7.0, 10.0]).double(), torch.tensor([10.0, 7.0, 4.0]).double()
    assert calibration_errors(two).tolist() == pytest.approx([0.3, 0.3])
    together = group_uncertainty(two, torch.tensor([[10.0, 1, 0]] * 2).double())
    assert together is not None and together["ece"] == pytest.approx(0)  # noqa: PT018
    nobody = altered(e, present=torch.zeros(6, dtype=torch.bool))
    assert calibration_of_clients(nobody, "seen") is None


def test_the_calibration_document_has_a_row_per_bin() -> None:
    e = evaluation(6)
    document = calibration_document(e)
    assert document["round"] == 3
    assert document["edges"] == [m / 15 for m in range(16)]
    size, confidence, right = (e.calibration[4, 1] + e.calibration[5, 1]).T
    rows = document["global"]["unseen"]
    assert [row[0] for row in rows] == size.tolist()
    filled = size > 0
    found = torch.tensor(rows, dtype=torch.float64)[filled]
    torch.testing.assert_close(found[:, 1], (confidence / size)[filled])
    torch.testing.assert_close(found[:, 2], (right / size)[filled])
    everyone_seen = altered(e, seen=torch.ones(6, dtype=torch.bool))
    assert calibration_document(everyone_seen)["personal"]["unseen"] is None
    assert calibration_document(evaluation(6, ("personal",)))["global"] is None
    json.dumps(document, allow_nan=False)
