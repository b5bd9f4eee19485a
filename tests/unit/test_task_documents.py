"""Files of an evaluation of every task: ``clients.csv`` and ``outputs.json``, against scikit-learn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from lazy import Lazy
from task_runs import write_task_run
from test_task_evaluation import SIZES, client, evaluated
from test_tasks import TASK

from fedloom.core.words import as_csv
from fedloom.data.manifest import ClientEntry
from fedloom.evaluation.documents import client_rows, output_document
from fedloom.evaluation.summary import Communication, RunCost, RunDescription, metrics_line, summary
from fedloom.reporting.compare import compare_runs
from fedloom.reporting.report import write_report
from fedloom.reporting.report_examples import outputs
from fedloom.runs.folder import RunFolder
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.multilabel import Multilabel
from fedloom.tasks.regression import Regression
from fedloom.tasks.segmentation import Segmentation

sk = Lazy("sklearn.metrics")


def entries(sizes: tuple[int, ...], seen: tuple[bool, ...] = (True, True, True)) -> list[ClientEntry]:
    counts = dict.fromkeys(("train", "validation", "test"), ())
    return [ClientEntry(f"c{i}", seen[i], 4, n + 1, n, counts, "0" * 64) for i, n in enumerate(sizes)]


@TASK
def test_clients_have_every_metric_of_their_task(task: PredictionTask) -> None:
    e = evaluated(task)
    absent = dataclasses.replace(e, present=torch.tensor([True, False, True]))
    rows = client_rows(absent, entries(SIZES))
    for predictor in ("personal", "global"):
        found = e.metrics(predictor, "test", torch.ones(3, dtype=torch.bool))
        for name, values in found.items():
            column = f"{predictor}_{name}_unmasked"
            if task.name == "classification" and name in ("log_loss", "ece"):
                assert column not in rows[0]
                continue
            assert rows[1][column] == ""
            for i in (0, 2):
                assert float(rows[i][column]) == pytest.approx(float(values[i]), rel=1e-5)


def test_pooled_areas_and_scores_of_labels_equal_scikit_learns() -> None:
    task = Multilabel()
    document = output_document(evaluated(task))
    tests = [client(task, i, n).test for i, n in enumerate(SIZES)]
    x, y = (torch.cat([getattr(test, name) for test in tests]).numpy() for name in ("x", "y"))
    (found,) = (document["personal"][key] for key in ("seen",))
    assert document["personal"]["unseen"] is None
    for k, row in enumerate(found):
        assert row["true"] == y[:, k].sum()
        assert row["f1"] == pytest.approx(sk.f1_score(y[:, k], x[:, k] > 0))
        bins = np.floor(x[:, k] / 0.25).clip(-32, 31)  # pooled scores are tied within a bin of log-odds
        assert row["auroc"] == pytest.approx(sk.roc_auc_score(y[:, k], bins))


def test_overlap_of_pixel_classes_equals_scikit_learns() -> None:
    task = Segmentation()
    document = output_document(evaluated(task))
    tests = [client(task, i, n).test for i, n in enumerate(SIZES)]
    y = torch.cat([test.y.flatten() for test in tests if test.y is not None]).numpy()
    predicted = torch.cat([test.x.argmax(1).flatten() for test in tests]).numpy()
    counted = y != task.ignore_index
    classes = range(len(document["names"]))
    iou = sk.jaccard_score(y[counted], predicted[counted], labels=classes, average=None, zero_division=0)
    assert [row["iou"] for row in document["global"]["seen"]] == pytest.approx(list(iou))
    assert [row["true"] for row in document["personal"]["seen"]] == [(y == k).sum() for k in classes]
    assert output_document(evaluated(Regression())) is None


def test_the_report_lists_the_worst_labels_first(tmp_path: Path) -> None:
    folder = write_task_run(tmp_path / "run", "multilabel")
    scores = {"flu": (0.9, 0.5), "cold": (0.4, None), "cough": (None, 0.7)}
    rows = [{"true": 3, "auroc": auroc, "f1": f1} for auroc, f1 in scores.values()]
    document = {"round": 30, "names": list(scores), "metrics": ["auroc", "f1"]}
    groups = {"seen": rows, "unseen": None}
    RunFolder(folder).write_json("outputs.json", {**document, "personal": groups, "global": None})
    (table,) = outputs(RunFolder(folder)).tables
    found = [[cell.text for cell in row.cells] for row in table.blocks[0][1]]
    assert found == [["cold", "3", "0.4", "–"], ["flu", "3", "0.9", "0.5"], ["cough", "3", "–", "0.7"]]
    assert "cough" in write_report(folder).read_text()


@pytest.mark.slow
@TASK
def test_pages_read_the_output_of_an_evaluation(tmp_path: Path, task: PredictionTask) -> None:
    if task.name == "classification":
        pytest.skip("test_report.py has classification")
    folder = RunFolder(write_task_run(tmp_path / "run", task.name))
    communication, lines = Communication(0, 0), []
    for number, scale in enumerate((0.2, 0.4, 0.6, 1.0)):
        e = dataclasses.replace(evaluated(task, scale), round=number, seen=torch.tensor([True, True, False]))
        lines.append(
            metrics_line(e, label_mask=False, train_loss=1.0, communication=communication, client_steps=number)
        )
    about = RunDescription("real", "ditto", "made-up", "module", 1)
    cost = RunCost(3, 5, communication, 1.0, 3, 1.0)
    whole = summary(e, lines, about, cost, label_mask=False, last=lines, extra={"ditto": {}})
    folder.reopen_lines()
    folder.rewrite("metrics.jsonl", lines)
    folder.write_json("summary.json", whole)
    folder.write("clients.csv", as_csv(client_rows(e, entries(SIZES, seen=(True, True, False)))))
    if (of_outputs := output_document(e)) is not None:
        folder.write_json("outputs.json", of_outputs)
    page = write_report(folder.path).read_text()
    assert "Left out" not in page
    rows = compare_runs([folder.path]).rows
    headline = task.headline.name
    (own,) = (row for row in rows if row.is_own)
    assert own.mean("seen") == whole["seen"]["metrics"][headline]["mean"]
    assert own.validation(best=False) == (lines[-1]["validation_pooled"], None)
    assert own.results[0].best.round == whole["best"]["round"]
    values = e.metrics("personal", "test", e.seen)[headline]
    assert own.client_values("seen") == pytest.approx(values.tolist(), rel=1e-6)
    assert whole["last_evaluations"]["seen"][f"{headline}_mean"]["mean"] == pytest.approx(
        sum(line["seen"]["metrics"][headline]["mean"] for line in lines[1:]) / 3
    )
