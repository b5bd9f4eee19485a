"""Clients with data of their own, from their owners' files to a run: packed, served, measured, and given models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from facts import mentions, tells
from run_processes import final

import fedloom as python
from fedloom.data.datasets import find_dataset
from fedloom.data.datasets.vowel import FEATURES, read_vowel
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import Experiment, from_shared_json, load_experiment, parse_experiment
from fedloom.runner import trained
from fedloom.runner.client_models import save_models
from fedloom.runner.observer import RunObserver
from fedloom.runner.options import RunOptions
from fedloom.runner.run_experiment import run_experiment

CLASS_NAMES = find_dataset("vowel").class_names

FIXTURES = Path(__file__).parents[1] / "fixtures"

EXPERIMENT = f"""\
name: vowels
data:
  own:
    kind: features
    input_shape: [9]
    classes: [{", ".join(CLASS_NAMES)}]
    features: [{", ".join(FEATURES)}]
model: {{name: mlp, hidden: [6]}}
algorithm: {{name: fedavg, local: {{steps: 3, lr: 0.1}}, personalize_steps: 2}}
federation: {{rounds: 4, clients_per_round: 2, checkpoint_every_s: 0}}
evaluation: {{every: 2, cohort: 2}}
runtime: {{workers: 0}}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "vowels.yaml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def packed(tmp_path: Path, experiment: Path, fedloom: Run) -> Path:
    """Five speakers, each packed from a CSV file of its own."""
    official = read_vowel({"Vowel.rda": (FIXTURES / "Vowel.rda").read_bytes()})
    pools = (official.train, official.test)
    x, y, owners = (np.concatenate([getattr(pool, name) for pool in pools]) for name in ("inputs", "labels", "owners"))
    for speaker in range(5):
        lines = [
            ",".join([CLASS_NAMES[label], *map(repr, map(float, row))])
            for row, label in zip(x[owners == speaker], y[owners == speaker], strict=True)
        ]
        source = tmp_path / f"speaker-{speaker}.csv"
        source.write_text("\n".join([",".join(["vowel", *FEATURES]), *lines]))
        out = tmp_path / "packed" / f"s{speaker}"
        code, said, _ = fedloom("data", "pack", source, "--out", out, "--experiment", experiment, "--label", "vowel")
        assert code == 0
        assert tells(said, f"speaker-{speaker}", 44, 9, 13, "9 features", "11 classes", out)
    return tmp_path / "packed"


def options(packed: Path, out: Path, trains: Sequence[int] = (0, 1, 2), observes: Sequence[int] = (3,)) -> RunOptions:
    data, observe = (tuple(packed / f"s{i}" for i in chosen) for chosen in (trains, observes))
    return RunOptions(out, data=data, observe=observe)


class Notices(RunObserver):
    """Observer that keeps notices."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        """Keep a notice."""
        self.texts.append(text)


def of(path: Path, *overrides: str) -> Experiment:
    return load_experiment(path, overrides)


def test_own_data_give_the_same_numbers_in_process_and_with_workers_and_on_replay(
    packed: Path, experiment: Path, tmp_path: Path
) -> None:
    first = run_experiment(of(experiment), options(packed, tmp_path / "a"))
    assert first.summary["dataset"] == "own"
    assert (first.summary["seen"]["clients"], first.summary["unseen"]["clients"]) == (3, 1)
    other = run_experiment(of(experiment, "runtime.workers=1"), options(packed, tmp_path / "b"))
    assert final(tmp_path / "a") == final(tmp_path / "b")
    for group in ("seen", "unseen", "global"):
        assert first.summary[group] == other.summary[group]
    again = dataclasses.replace(options(packed, tmp_path / "c"), replay=tmp_path / "b")
    run_experiment(of(experiment), again)
    assert final(tmp_path / "c") == final(tmp_path / "a")


def test_noise_of_clients_with_workers_is_secret_and_a_replay_says_that_it_cannot_repeat_it(
    packed: Path, experiment: Path, tmp_path: Path
) -> None:
    privacy = "{clip: 0.5, noise_multiplier: 1.0, delta: 1e-3, sampling: fixed, noise: distributed}"
    keys = (
        f"federation.privacy={privacy}",
        "federation.secure_aggregation={signatures: none}",
        "algorithm.weighting=uniform",
    )
    sizes = ("federation.clients_per_round=3", "federation.min_clients=3")
    e, cohort = of(experiment, *keys, *sizes), range(3)
    noise = []
    for out, settings in (("a", e), ("b", e), ("c", e)):
        workers = {"a": 0, "b": 1, "c": 1}[out]
        settings = settings.model_copy(update={"runtime": settings.runtime.model_copy(update={"workers": workers})})
        summary = run_experiment(settings, options(packed, tmp_path / out, trains=tuple(cohort))).summary
        noise.append(summary["training_privacy"]["noise"])
    assert noise == ["seed", "secret", "secret"]
    assert len({final(tmp_path / out) for out in "abc"}) == 3
    told = Notices()
    for out, repeated in (("d", "a"), ("e", "b")):
        again = dataclasses.replace(options(packed, tmp_path / out, trains=tuple(cohort)), replay=tmp_path / repeated)
        run_experiment(e, again, told)
    assert final(tmp_path / "d") == final(tmp_path / "a")
    assert final(tmp_path / "e") != final(tmp_path / "b")
    assert sum(mentions(text, "replay", "noise", "secret") for text in told.texts) == 1


def test_the_run_goes_on_with_the_same_clients_alone(packed: Path, experiment: Path, tmp_path: Path) -> None:
    run_experiment(of(experiment, "federation.rounds=2"), options(packed, tmp_path / "a"))
    more = dataclasses.replace(options(packed, tmp_path / "a"), resume=True)
    run_experiment(of(experiment), more)
    run_experiment(of(experiment), options(packed, tmp_path / "b"))
    assert final(tmp_path / "a") == final(tmp_path / "b")
    others = dataclasses.replace(options(packed, tmp_path / "b", trains=(0, 1)), resume=True)
    with pytest.raises(DataError, match="started with partition"):
        run_experiment(of(experiment, "federation.rounds=5"), others)


def test_clients_of_their_own_are_measured_and_get_models(packed: Path, experiment: Path, tmp_path: Path) -> None:
    summary = run_experiment(of(experiment), options(packed, tmp_path / "a")).summary
    measured = trained.evaluate(tmp_path / "a", data=[packed / f"s{i}" for i in range(4)]).statistics
    for group in ("seen", "unseen"):
        assert measured[group] == summary[group]
    new = trained.evaluate(tmp_path / "a", data=[packed / "s4"]).statistics
    assert new["seen"] is None
    assert new["unseen"]["clients"] == 1
    made = save_models(tmp_path / "a", tmp_path / "models", data=[packed])
    assert (list(made.saved), made.lost) == ([f"speaker-{i}" for i in range(5)], {})
    with pytest.raises(ExperimentError) as caught:
        trained.evaluate(tmp_path / "a")
    assert tells(str(caught.value), "clients", "own data", "packed")
    for without in (
        lambda: python.load(tmp_path / "a").models(),
        lambda: python.run(experiment, out=tmp_path / "b", report=False, progress=False),
    ):
        with pytest.raises(ExperimentError) as caught:
            without()
        assert tells(str(caught.value), "packed")
        assert "--data" not in str(caught.value)


def test_a_given_normalization_is_the_one_that_is_used(packed: Path, experiment: Path, tmp_path: Path) -> None:
    numbers = ", ".join(["0.5"] * 9)
    e = of(experiment, f"data.own.normalization={{mean: [{numbers}], std: [{numbers}]}}")
    run_experiment(e, options(packed, tmp_path / "a"))
    manifest = json.loads((tmp_path / "a" / "partition.json").read_text())
    assert manifest["normalization"] == {"mean": [0.5] * 9, "std": [0.5] * 9}


def test_what_would_leave_is_shown_and_nothing_is_sent(packed: Path, experiment: Path, fedloom: Run) -> None:
    code, said, _ = fedloom("worker", "--data", packed / "s0", "--observe", packed / "s1", "--dry-run")
    assert code == 0
    assert tells(said, '"id": "speaker-0"', '"train": 44', '"labelled": true', '"observer": true', "InputMoments.sum")
    assert said.count('"class_counts": []') == 2
    for facts in (("fedavg", "Update.delta_theta"), ("pefll", "Descriptor.v"), ("pfedbayes", "Gaussian"), ("Metrics",)):
        assert tells(said, *facts)
    assert "InputMoments" not in fedloom("worker", "--observe", packed / "s1", "--dry-run")[1]
    code, said, _ = fedloom(
        "worker", "--data", packed / "s0", "--dry-run", "--experiment", experiment, "--class-counts"
    )
    assert code == 0
    assert tells(said, '"class_counts": [4', "Update.delta_theta", "model_update", "[137]", 137, "Update.loss", "loss")
    assert "pefll" not in said
    assert "in sums only" not in said


@pytest.mark.parametrize(("name", "plain"), [("fedavg", []), ("comfedl", ["LossAtSharedModel.loss"])])
def test_what_would_only_be_summed_is_shown(
    packed: Path, experiment: Path, fedloom: Run, name: str, plain: Sequence[str]
) -> None:
    text = experiment.read_text().replace("clients_per_round: 2", "clients_per_round: 3, min_clients: 3")
    text = text.replace("checkpoint_every_s: 0", "secure_aggregation: {signatures: keys}")
    if name != "fedavg":
        text = text.replace("name: fedavg, local: {steps: 3, lr: 0.1}, personalize_steps: 2", f"name: {name}")
    experiment.write_text(text)
    code, said, _ = fedloom("worker", "--data", packed / "s0", "--dry-run", "--experiment", experiment)
    assert code == 0
    rows = [line.rstrip() for line in said.splitlines() if line.rstrip().endswith(("as it is", "in sums only"))]
    assert [line.split()[0] for line in rows if line.endswith("as it is")] == plain
    assert tells(said, "MomentDigits.squares", "delta_theta", "SummedMetrics.moments", "masks")
    assert "InputMoments" not in said


@pytest.mark.parametrize(
    ("private", "facts"),
    [
        ("privacy: {of: examples, clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-5}", ["examples", "sent as 0"]),
        ("privacy: {clip: 0.25, noise_multiplier: 1.0, delta: 1.0e-5}", ["clients", 0.25, "aggregator adds noise"]),
    ],
)
def test_what_has_noise_is_shown(
    packed: Path, experiment: Path, fedloom: Run, private: str, facts: Sequence[object]
) -> None:
    given = f"    normalization: {{mean: {[0.0] * 9}, std: {[1.0] * 9}}}\nmodel"
    text = experiment.read_text().replace("model", given, 1).replace("checkpoint_every_s: 0", private)
    experiment.write_text(text.replace("name: fedavg", "name: fedavg, weighting: uniform"))
    code, said, _ = fedloom("worker", "--data", packed / "s0", "--dry-run", "--experiment", experiment)
    assert code == 0
    assert tells(said, "Update.loss", *facts)
    assert "InputMoments" not in said


def test_what_cannot_be_served_or_run_is_refused(packed: Path, experiment: Path, tmp_path: Path, fedloom: Run) -> None:
    dealt = tmp_path / "dealt.yaml"
    dealt.write_text(
        "{name: d, data: {dataset: vowel, partition: {scheme: natural}}, model: {name: mlp, hidden: [4]}, "
        "algorithm: {name: fedavg}, federation: {rounds: 1}}"
    )
    data = ("--data", packed / "s0")
    at = ("--aggregator", "127.0.0.1:1")
    for command, code, facts in (
        (("run", experiment), 2, ("data.own", "--data", "fedloom data pack")),
        (("run", dealt, *data), 2, ("--data", "data.own", "data.dataset")),
        (("run", experiment, *data, "--partition", "x"), 2, ("--partition", "--data")),
        (("partition", experiment), 2, ("data.own", "fedloom data pack")),
        (("run", experiment, *data, "--set", "federation.clients_per_round=2"), 2, ("clients_per_round", 2, 1)),
        (("worker", *at), 2, ("--partition", "--data", "neither")),
        (("worker", *at, *data, "--partition", "x"), 2, ("--partition", "--data", "both")),
        (("worker", *at, *data, "--clients", "speaker-9"), 2, ("--clients", "speaker-9", "speaker-0")),
        (("worker", *data), 2, ("--aggregator", "HOST:PORT")),
        (("worker", *at, *data, "--experiment", "x"), 2, ("--experiment", "--dry-run")),
        (("worker", "--partition", "x", "--dry-run"), 2, ("--dry-run", "--data")),
        (("worker", *data, "--dry-run", "--experiment", dealt), 2, ("--experiment", "data.own")),
        (("worker", *data, "--dry-run", "--only-sums", "--experiment", experiment), 4, ("--only-sums",)),
        (("data", "pack", "x.csv", "--out", "y", "--experiment", dealt), 2, ("--experiment", "data.own")),
        (("data", "pack", "x.csv", "--out", "y", "--set", "seed=1"), 2, ("--set", "--experiment")),
        (("data", "pack", "x.csv", "--out", "y"), 3, ("x.csv", "does not exist")),
        (("run", experiment, "--data", tmp_path), 3, ("client.json",)),
    ):
        found, _, said = fedloom(*command)
        assert (found, tells(said, *facts)) == (code, True), said
    other = EXPERIMENT.replace("[hid, hId,", "[hId, hid,")
    (tmp_path / "other.yaml").write_text(other)
    found, _, said = fedloom("run", tmp_path / "other.yaml", *data, "--out", tmp_path / "run")
    assert found == 3
    assert tells(said, "s0", "classes", "hid, hId", "data.own", "hId, hid", "fedloom data pack")
    assert not (tmp_path / "run").exists()


def test_columns_in_another_order_get_no_model(packed: Path, experiment: Path, tmp_path: Path, fedloom: Run) -> None:
    rows = [line.split(",") for line in (tmp_path / "speaker-4.csv").read_text().splitlines()]
    swapped = tmp_path / "swapped.csv"
    swapped.write_text("\n".join(",".join([row[0], row[2], row[1], *row[3:]]) for row in rows))
    for name, more in (("swapped", ()), ("ordered", ("--experiment", experiment))):
        assert fedloom("data", "pack", swapped, "--out", tmp_path / name, "--label", "vowel", *more)[0] == 0
    run_experiment(of(experiment), options(packed, tmp_path / "run"))
    asked = ("personalize", tmp_path / "run", "--out", tmp_path / "m.safetensors", "--data")
    found, _, said = fedloom(*asked, tmp_path / "swapped")
    assert (found, tells(said, "swapped", "features", "V3, V2, V4", "data.own.features", "V2, V3, V4")) == (3, True)
    assert fedloom(*asked, tmp_path / "ordered")[0] == 0


def test_a_resolved_experiment_is_read_to_the_same_and_shared_with_workers(experiment: Path) -> None:
    e = of(experiment)
    assert parse_experiment(e.resolved_yaml()) == e
    assert from_shared_json(e.shared_json(), root="/nowhere").data == e.data


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("data.dataset=mnist", ("data.dataset", "own", "dataset and partition")),
        ("data.held_out_fraction=0.2", ("data.held_out_fraction", "own")),
        ("data.own.kind=sound", ("data.own.kind", "pixels, features, tokens", '"sound"')),
        ("data.own.kind=pixels", ("data.own.input_shape", "[9]", "[channels, height, width]")),
        ("data.own.input_shape=[0]", ("data.own.input_shape", "[0]", "at least 1")),
        ("data.own.classes=[]", ("data.own.classes", "empty", "at least one")),
        ("data.own.classes=[a, b, a]", ("data.own.classes", "'a'", "twice")),
        ("data.own.classes=[1, 2]", ("data.own.classes", "text", "1")),
        ("data.own.clases=[a]", ("data.own.clases", "unknown key", "classes")),
        ("data.own.features=[a]", ("data.own.features", 9, "different", "'a'")),
        ("data.own.normalization=guessed", ("data.own.normalization", "measured", '"guessed"')),
        ("data.own.normalization={mean: [1], std: [1]}", ("data.own.normalization", 1, 9)),
        ("data.own.normalization={mean: [.nan], std: [1]}", ("data.own.normalization", "finite")),
        ("data.own=null", ("data.own", "a mapping", "null")),
        ("model={name: lenet}", ("model.name", "lenet", "mlp")),
        ("algorithm={name: wga}", ("algorithm.name", "wga", "data.own")),
        ("algorithm={name: pefll}", ("algorithm.descriptor.size", "null", "a number", "data.own")),
    ],
)
def test_what_the_experiment_may_not_say(override: str, facts: tuple[object, ...], experiment: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(experiment, [override])
    assert tells(str(caught.value), *facts), str(caught.value)
