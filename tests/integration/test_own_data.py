"""Clients with their own data, from the owners' files to a run: packed, served, measured, and given models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from facts import mentions, tells
from run_processes import final
from vowel_data import vowel_examples, vowel_experiment

import fedloom as python
from fedloom.core.words import rounded_up
from fedloom.data.datasets import find_dataset
from fedloom.engine import trained
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.engine.run_experiment import run_experiment
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import Experiment, from_shared_json, load_experiment, parse_experiment
from fedloom.privacy.accounting import epsilon_of, sampled
from fedloom.runs.folder import RunFolder
from fedloom.serving.client_models import save_models

FEATURES = tuple(f"V{i}" for i in range(2, 11))
"""Columns of measurements of Vowel."""

pytestmark = pytest.mark.usefixtures("forks")

CLASS_NAMES = find_dataset("vowel").spec.class_names

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
    """Pack five speakers, each from a separate CSV file."""
    x, y, owners = vowel_examples()
    for speaker in range(5):
        lines = [
            ",".join([CLASS_NAMES[label], *map(repr, map(float, row))])
            for row, label in zip(x[owners == speaker], y[owners == speaker], strict=True)
        ]
        source = tmp_path / f"speaker-{speaker}.csv"
        source.write_text("\n".join([",".join(["vowel", *FEATURES]), *lines]))
        out = tmp_path / "packed" / f"s{speaker}"
        code, output, _ = fedloom(
            "data", "pack", source, "--out", out, "--experiment", experiment, "--set", "label=vowel"
        )
        assert code == 0
        assert tells(output, f"speaker-{speaker}", 44, 9, 13, "9 features", "11 classes", out)
    return tmp_path / "packed"


def options(packed: Path, out: Path, trains: Sequence[int] = (0, 1, 2), observes: Sequence[int] = (3,)) -> RunOptions:
    data, observe = (tuple(packed / f"s{i}" for i in chosen) for chosen in (trains, observes))
    return RunOptions(out, packed=data, observe=observe)


class Notices(RunObserver):
    """Observer that records notices."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        """Record a notice."""
        self.texts.append(text)


def of(path: Path, *overrides: str) -> Experiment:
    return load_experiment(path, overrides)


@pytest.mark.slow
def test_own_data_give_equal_results_in_process_with_workers_and_on_replay(
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


@pytest.mark.slow
def test_a_member_without_labels_trains_only_with_a_suitable_method(
    packed: Path, experiment: Path, tmp_path: Path, fedloom: Run
) -> None:
    """Its data affect the run; it is not measured, because it has no labels."""
    bare = packed / "s2" / "bare.csv"
    rows = [line.split(",", 1)[1] for line in (tmp_path / "speaker-2.csv").read_text().splitlines()]
    bare.write_text("\n".join(rows))
    out = packed / "s5"
    assert fedloom("data", "pack", bare, "--out", out, "--experiment", experiment, "--set", "labelled=false")[0] == 0
    flowdup = "algorithm={name: flowdup, local: {steps: 3, lr: 0.1}, embedding: {network: mlp, labels: false}}"
    trains, labelled = (0, 1, 5), (0, 1)
    for workers in (0, 1):
        e = of(experiment, flowdup, f"runtime.workers={workers}")
        found = run_experiment(e, options(packed, tmp_path / f"with-{workers}", trains))
    assert final(tmp_path / "with-0") == final(tmp_path / "with-1")
    assert (found.summary["seen"]["clients"], found.summary["unseen"]["clients"]) == (2, 1)
    run_experiment(of(experiment, flowdup), options(packed, tmp_path / "without", labelled))
    assert final(tmp_path / "without") != final(tmp_path / "with-0")
    with pytest.raises(DataError) as refused:
        run_experiment(of(experiment), options(packed, tmp_path / "fedavg", trains))
    assert mentions(str(refused.value), "s5", "observe")


@pytest.mark.slow
def test_noise_with_workers_is_secret_and_a_replay_is_rejected(packed: Path, experiment: Path, tmp_path: Path) -> None:
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
    reported = Notices()
    for out, repeated in (("d", "a"), ("e", "b")):
        again = dataclasses.replace(options(packed, tmp_path / out, trains=tuple(cohort)), replay=tmp_path / repeated)
        run_experiment(e, again, reported)
    assert final(tmp_path / "d") == final(tmp_path / "a")
    assert final(tmp_path / "e") != final(tmp_path / "b")
    assert sum(mentions(text, "replay", "noise", "secret") for text in reported.texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("of_what", "least"), [("clients", 0.3), ("examples", 0.1)])
def test_canaries_among_packed_clients_are_found(
    packed: Path, experiment: Path, tmp_path: Path, of_what: Any, least: float
) -> None:
    """The partition beside the audit's run has the packed clients and canaries, normalized as the former."""
    before = {path: path.read_bytes() for path in packed.rglob("*") if path.is_file()}
    settings = {"steps": 5 if of_what == "clients" else 40, "lr": 0.05, "batch_size": 8}
    found = python.audit(
        experiment, canaries=60, of=of_what, seed=4, packed=packed, out=tmp_path / "audit", report=False,
        federation__rounds=10, federation__clients_per_round=5, model__hidden=[64], algorithm__local=settings,
        algorithm__personalize_steps=0, runtime__workers=1, progress=False,
    )  # fmt: skip
    document = found.audit["canaries"]
    assert document["right"] > 0.8 * (document["guesses_in"] + document["guesses_out"])
    assert least < document["epsilon"] <= document["largest_bound"]
    assert found.summary["seen"]["clients"] == 5  # canary clients are in no result
    manifest = json.loads((found.folder / "partition.json").read_text())
    run_experiment(of(experiment, "federation.rounds=1"), options(packed, tmp_path / "plain", range(5), ()))
    plain = json.loads((tmp_path / "plain" / "partition.json").read_text())
    assert (manifest["spec"], manifest["dataset"]) == (plain["spec"], "own")
    assert len(manifest["clients"]) == (65 if of_what == "clients" else 5)
    assert python.audit(found).audit["canaries"] == document  # by the partition beside the run
    assert {path: path.read_bytes() for path in packed.rglob("*") if path.is_file()} == before


def test_canaries_need_data_on_this_machine(packed: Path, experiment: Path, tmp_path: Path) -> None:
    """Members of a live federation keep their data, so canaries cannot be added."""
    dealt = vowel_experiment(tmp_path, algorithm={"name": "fedavg"}, federation={"rounds": 1})
    given: Mapping[str, Any]
    for what, given in ((experiment, {}), (dealt, {"packed": packed})):
        with pytest.raises(ExperimentError) as caught:
            python.audit(what, canaries=20, out=tmp_path / "audit", progress=False, **given)
        assert caught.value.key == "packed"
    assert not (tmp_path / "audit").exists()


OF_EXAMPLES = "federation.privacy={of: examples, clip: 1.0, noise_multiplier: 2.0, delta: 1e-4}"
GIVEN = f"data.own.normalization={{mean: {[0.0] * 9}, std: {[1.0] * 9}}}"
"""Sums of the inputs would leave the clients without noise."""
OF_CLIENTS = "federation.privacy={clip: 1.0, noise_multiplier: 4.0, delta: 1e-4}"


@pytest.mark.slow
@pytest.mark.parametrize("private", [OF_EXAMPLES, OF_CLIENTS])
def test_a_ledger_counts_the_training_of_its_owner(
    packed: Path, experiment: Path, tmp_path: Path, fedloom: Run, private: str
) -> None:
    keys = (private, GIVEN, "runtime.workers=1", "algorithm.weighting=uniform")
    summary = run_experiment(of(experiment, *keys), options(packed, tmp_path / "a", range(5), ())).summary
    reported = summary["training_privacy"]
    assert reported["noise"] == "secret"
    if private == OF_CLIENTS:
        counts = {sampled("poisson", 5, 2, 4.0): 4}
        assert sum(each["times"] for each in reported["releases"]) == 4
    else:
        lines = [json.loads(line) for line in (tmp_path / "a" / "releases.jsonl").read_text().splitlines()]
        own = [each for line in lines for each in line.get("releases", ()) if "speaker-1" in each["units"]]
        counts = {sampled("poisson", 44, 32, 2.0): sum(each["times"] for each in own)}
    code, out, _ = fedloom("ledger", tmp_path / "l", "--training", tmp_path / "a", "--client", "speaker-1", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["epsilon"] == pytest.approx(epsilon_of(counts, 1e-4, replacing=True))
    assert (found["delta"], found["basic"], len(found["trainings"])) == (1e-4, False, 1)
    code, again, output = fedloom("ledger", tmp_path / "l", "--training", tmp_path / "a" / "summary.json", "--json")
    assert (code, json.loads(again), bool(output)) == (0, found, True)  # counted once, by its summary
    code, out, _ = fedloom("ledger", tmp_path / "l")
    assert (code, mentions(out, "vowels", rounded_up(found["epsilon"]))) == (0, True)
    cost = python.privacy_cost(of(experiment, *keys), clients=5, examples=44, ledger=tmp_path / "l")
    assert cost.with_ledger is not None
    assert cost.with_ledger.epsilon > found["epsilon"]


@pytest.mark.slow
def test_a_client_never_asked_to_train_has_spent_nothing(
    packed: Path, experiment: Path, tmp_path: Path, fedloom: Run
) -> None:
    keys = (OF_EXAMPLES, GIVEN, "runtime.workers=1", "algorithm.weighting=uniform", "federation.rounds=1")
    run_experiment(of(experiment, *keys), options(packed, tmp_path / "a", range(5), ()))
    lines = [json.loads(line) for line in (tmp_path / "a" / "releases.jsonl").read_text().splitlines()]
    asked = {unit for line in lines for each in line.get("releases", ()) for unit in each["units"]}
    left = sorted({f"speaker-{i}" for i in range(5)} - asked)
    assert len(left) == 3
    given = json.loads((tmp_path / "a" / "partition.json").read_text())["spec"]["inputs"][""]["normalization"]
    assert given == {"mean": [0.0] * 9, "std": [1.0] * 9}
    code, out, _ = fedloom("ledger", tmp_path / "l", "--training", tmp_path / "a", "--client", left[0], "--json")
    assert (code, json.loads(out)["epsilon"], len(json.loads(out)["trainings"])) == (0, 0.0, 1)


@pytest.mark.slow
def test_a_ledger_completes_a_claim_and_rejects_unprotected_training(
    packed: Path, experiment: Path, tmp_path: Path, fedloom: Run
) -> None:
    keys = (OF_EXAMPLES, GIVEN, "algorithm.weighting=uniform", "federation.clients_per_round=5")
    run_experiment(of(experiment, *keys), options(packed, tmp_path / "a", range(5), ()))  # in process
    run_experiment(of(experiment), options(packed, tmp_path / "b", range(5), ()))
    for where, fact in (("a", "seed"), ("b", "training_privacy"), ("nowhere", "nowhere")):
        code, _, output = fedloom("ledger", tmp_path / "l", "--training", tmp_path / where)
        assert (code, fact in output) == (3 if where == "nowhere" else 2, True)
    assert not (tmp_path / "l").exists()
    run_experiment(of(experiment, *keys, "runtime.workers=1"), options(packed, tmp_path / "c", range(5), ()))
    code, _, output = fedloom("ledger", tmp_path / "l", "--training", tmp_path / "c", "--client", "speaker-9")
    assert (code, mentions(output, "speaker-9", "speaker-1")) == (2, True)
    folder = RunFolder(tmp_path / "c")
    summary = {key: value for key, value in folder.json("summary.json").items() if key != "digest"}
    assert len(summary["training_privacy"].pop("releases")) == 1  # all have 44 examples and made equally many steps
    folder.write_json("summary.json", summary)
    code, out, _ = fedloom("ledger", tmp_path / "l", "--training", folder.path / "summary.json", "--json")
    epsilon = summary["training_privacy"]["epsilon"]
    assert (code, json.loads(out)["basic"]) == (0, True)
    assert json.loads(out)["epsilon"] == pytest.approx(2 * epsilon)  # removed, then added
    summary["training_privacy"]["unit"] = "hospitals"
    folder.write_json("summary.json", summary)
    code, _, output = fedloom("ledger", tmp_path / "l", "--training", folder.path)
    assert (code, mentions(output, "summary.json", "unit")) == (3, True)


@pytest.mark.slow
def test_descriptors_of_a_client_trained_without_privacy_have_no_total(
    packed: Path, experiment: Path, tmp_path: Path
) -> None:
    method = (
        "algorithm={name: pefll, local: {steps: 1}, embedding: {network: mlp}, descriptor: {size: 4, batch_size: 4}}"
    )
    run_experiment(of(experiment, method, "federation.rounds=1"), options(packed, tmp_path / "a"))
    asked: dict[str, Any] = {"epsilon": 1.0, "clip": 1.0, "ledger": tmp_path / "l"}
    with pytest.raises(ExperimentError) as caught:
        python.personalize(str(tmp_path / "a"), data=packed / "s0", **asked)
    assert (caught.value.key, (tmp_path / "l").exists()) == ("training", False)
    card = python.personalize(str(tmp_path / "a"), data=packed / "s3", **asked).card  # it was only evaluated
    assert (card.privacy.requests, card.privacy.trainings) == (1, 0)


@pytest.mark.slow
def test_a_run_resumes_only_with_the_same_clients(packed: Path, experiment: Path, tmp_path: Path) -> None:
    run_experiment(of(experiment, "federation.rounds=2"), options(packed, tmp_path / "a"))
    more = dataclasses.replace(options(packed, tmp_path / "a"), resume=True)
    run_experiment(of(experiment), more)
    run_experiment(of(experiment), options(packed, tmp_path / "b"))
    assert final(tmp_path / "a") == final(tmp_path / "b")
    others = dataclasses.replace(options(packed, tmp_path / "b", trains=(0, 1)), resume=True)
    with pytest.raises(DataError, match="started with partition"):
        run_experiment(of(experiment, "federation.rounds=5"), others)


@pytest.mark.slow
def test_clients_with_own_data_are_measured_and_get_models(packed: Path, experiment: Path, tmp_path: Path) -> None:
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


def test_dry_run_shows_messages_and_sends_nothing(packed: Path, experiment: Path, fedloom: Run) -> None:
    code, output, _ = fedloom("worker", "--data", packed / "s0", "--observe", packed / "s1", "--dry-run", "any")
    assert code == 0
    assert tells(output, '"id": "speaker-0"', '"train": 44', '"labelled": true', '"observer": true', "InputMoments.sum")
    assert output.count('"class_counts": []') == 2
    for facts in (("fedavg", "Update.delta_theta"), ("pefll", "Descriptor.v"), ("pfedbayes", "Gaussian"), ("Metrics",)):
        assert tells(output, *facts)
    assert "InputMoments" not in fedloom("worker", "--observe", packed / "s1", "--dry-run", "any")[1]
    code, output, _ = fedloom("worker", "--data", packed / "s0", "--dry-run", experiment, "--set", "class_counts=true")
    assert code == 0
    assert tells(
        output, '"class_counts": [4', "Update.delta_theta", "model_update", "[137]", 137, "Update.loss", "loss"
    )
    assert "pefll" not in output
    assert "only in sums" not in output


@pytest.mark.parametrize(("name", "plain"), [("fedavg", []), ("comfedl", ["LossAtSharedModel.loss"])])
def test_dry_run_marks_values_that_are_only_summed(
    packed: Path, experiment: Path, fedloom: Run, name: str, plain: Sequence[str]
) -> None:
    text = experiment.read_text().replace("clients_per_round: 2", "clients_per_round: 3, min_clients: 3")
    text = text.replace("checkpoint_every_s: 0", "secure_aggregation: {signatures: keys, examples: 1000}")
    if name != "fedavg":
        text = text.replace("name: fedavg, local: {steps: 3, lr: 0.1}, personalize_steps: 2", f"name: {name}")
    experiment.write_text(text)
    code, output, _ = fedloom("worker", "--data", packed / "s0", "--dry-run", experiment)
    assert code == 0
    rows = [line.rstrip() for line in output.splitlines() if line.rstrip().endswith(("individually", "only in sums"))]
    assert [line.split()[0] for line in rows if line.endswith("individually")] == plain
    assert tells(output, "MomentDigits.squares", "delta_theta", "SummedMetrics.moments", "masks")
    assert "InputMoments" not in output


@pytest.mark.parametrize(
    ("private", "facts"),
    [
        ("privacy: {of: examples, clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-5}", ["examples", "sent as 0"]),
        ("privacy: {clip: 0.25, noise_multiplier: 1.0, delta: 1.0e-5}", ["clients", 0.25, "aggregator adds noise"]),
    ],
)
def test_dry_run_marks_values_with_noise(
    packed: Path, experiment: Path, fedloom: Run, private: str, facts: Sequence[object]
) -> None:
    given = f"    normalization: {{mean: {[0.0] * 9}, std: {[1.0] * 9}}}\nmodel"
    text = experiment.read_text().replace("model", given, 1).replace("checkpoint_every_s: 0", private)
    experiment.write_text(text.replace("name: fedavg", "name: fedavg, weighting: uniform"))
    code, output, _ = fedloom("worker", "--data", packed / "s0", "--dry-run", experiment)
    assert code == 0
    assert tells(output, "Update.loss", *facts)
    assert "InputMoments" not in output


def test_unusable_folders_are_rejected(packed: Path, experiment: Path, tmp_path: Path, fedloom: Run) -> None:
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
        (("worker", "--partition", "x", "--dry-run", "any"), 2, ("--dry-run", "--data")),
        (("worker", *data, "--dry-run", dealt), 2, ("--dry-run", "data.own")),
        (("worker", *data, "--only-sums", "--dry-run", experiment), 4, ("--only-sums",)),
        (("data", "pack", "x.csv", "--out", "y", "--experiment", dealt), 2, ("--experiment", "data.own")),
        (("data", "pack", "x.csv", "--out", "y", "--set", "seed=-1"), 2, ("--set", "seed", -1)),
        (("data", "pack", "x.csv", "--out", "y"), 3, ("x.csv", "does not exist")),
        (("run", experiment, "--data", tmp_path), 3, ("client.json",)),
    ):
        found, _, output = fedloom(*command)
        assert (found, tells(output, *facts)) == (code, True), output
    other = EXPERIMENT.replace("[hid, hId,", "[hId, hid,")
    (tmp_path / "other.yaml").write_text(other)
    found, _, output = fedloom("run", tmp_path / "other.yaml", *data, "--out", tmp_path / "run")
    assert found == 3
    assert tells(output, "s0", "classes", "hid, hId", "data.own", "hId, hid", "fedloom data pack")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_client_with_reordered_columns_gets_no_model(
    packed: Path, experiment: Path, tmp_path: Path, fedloom: Run
) -> None:
    rows = [line.split(",") for line in (tmp_path / "speaker-4.csv").read_text().splitlines()]
    swapped = tmp_path / "swapped.csv"
    swapped.write_text("\n".join(",".join([row[0], row[2], row[1], *row[3:]]) for row in rows))
    for name, more in (("swapped", ()), ("ordered", ("--experiment", experiment))):
        assert fedloom("data", "pack", swapped, "--out", tmp_path / name, "--set", "label=vowel", *more)[0] == 0
    run_experiment(of(experiment), options(packed, tmp_path / "run"))
    asked = ("personalize", tmp_path / "run", "--out", tmp_path / "m.safetensors", "--data")
    found, _, output = fedloom(*asked, tmp_path / "swapped")
    assert (found, tells(output, "swapped", "features", "V3, V2, V4", "data.own.features", "V2, V3, V4")) == (3, True)
    assert fedloom(*asked, tmp_path / "ordered")[0] == 0


def test_a_resolved_experiment_reads_back_unchanged_and_reaches_workers(experiment: Path) -> None:
    e = of(experiment)
    assert parse_experiment(e.resolved_yaml()) == e
    assert from_shared_json(e.shared_json(), root="/nowhere").data == e.data


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("data.dataset=mnist", ("data.dataset", "own", "dataset and partition")),
        ("data.held_out_fraction=0.2", ("data.held_out_fraction", "own")),
        ("data.own.kind=sound", ("data.own.kind", "features", '"sound"')),
        ("data.own.kind=pixels", ("data.own.input_shape", "[9]", "[channels, height, width]")),
        ("data.own.input_shape=[0]", ("data.own.input_shape", "[0]", "at least 1")),
        ("data.own.classes=[]", ("data.own.classes", "empty", "at least one")),
        ("data.own.classes=[a, b, a]", ("data.own.classes", "'a'", "twice")),
        ("data.own.classes=[1, 2]", ("data.own.classes", "string", "1")),
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
def test_keys_that_an_open_federation_rejects(override: str, facts: tuple[object, ...], experiment: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(experiment, [override])
    assert tells(str(caught.value), *facts), str(caught.value)
