"""A member's policy: its keys, hours, counts that outlive the process, approvals, and refusals with their lines."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from facts import mentions, refusing

from fedloom.algorithms.base import find_algorithm
from fedloom.engine.member import check_allowed
from fedloom.engine.options import WorkerOptions
from fedloom.errors import DataError, ExperimentError, RefusedError
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.experiment import parse_experiment
from fedloom.federation.transport import ConversationKey, Declined
from fedloom.ledger.ledger import PrivacyAccountant
from fedloom.ledger.training_cost import ClaimedTraining
from fedloom.member import usage as usages
from fedloom.member.approvals import MISSING, Approvals, experiment_differences, experiment_digest
from fedloom.member.guard import RESERVE, PolicyEnforcer, code_refusals, refusals
from fedloom.member.policy import Hours, Policy, PolicyFile, code_digest, load_policy, only_sums_policy
from fedloom.member.usage import AHEAD, RECORD, Usage
from fedloom.messages import Message, Quantity, broadcast, rows
from fedloom.privacy.accounting import Release, epsilon_of, gaussian_release
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.spent import TrainingCost

ROOT = Path(__file__).parents[2]

OWN = {
    "kind": "features",
    "input_shape": [2],
    "classes": ["a", "b"],
    "normalization": {"mean": [0.0] * 2, "std": [1.0] * 2},
}
EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "data": {"own": OWN},
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg", "local": {"steps": 1, "lr": 0.1, "batch_size": 4}},
    "federation": {"rounds": 3, "clients_per_round": 5, "min_clients": 5},
}
PRIVATE = {"of": "examples", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
SECURE = {"signatures": "keys", "examples": 100}


def experiment(federation: dict[str, Any] | None = None, **sections: Any) -> Any:
    whole = {**EXPERIMENT, **sections, "federation": {**EXPERIMENT["federation"], **(federation or {})}}
    return parse_experiment(yaml.safe_dump(whole))


def policy(folder: Path, text: str) -> PolicyFile:
    path = folder / "policy.yaml"
    path.write_text(text)
    return load_policy(path)


# --- keys -------------------------------------------------------------------------------------------------------------

BAD = {
    "only_sum: true": ("only_sum", "only_sums"),
    "only_sums: false\nsmallest_cohort: 4": ("line 2", "smallest_cohort", "only_sums", 4),
    "only_sums: true\nsmallest_cohort: 2": ("line 2", "smallest_cohort", 3),
    "approve: listed": ("experiments", "approve: listed"),
    "experiments: [0123456789abcdef]": ("experiments", "approve: any"),
    "approve: listed\nexperiments: [zz]": ("line 2", "experiments", "zz"),
    "hours: 8-12": ("hours", "20:00-06:00", "8-12"),
    "hours: 08:00-08:00": ("hours", "08:00-08:00"),
    "hours: 25:00-26:00": ("hours", "25:00-26:00"),
    "traffic: {per_day: 5 apples}": ("traffic.per_day", "5 apples", "GB"),
    "traffic: {per_day: 0}": ("traffic.per_day", 0),
    "privacy: {epsilon: 5, epsilon_total: 2}": ("privacy.epsilon", 5, 2),
    "privacy: {ledger: ledger.jsonl}": ("privacy.ledger", "epsilon_total"),
    "privacy: {unit: hospitals}": ("privacy.unit", "hospitals"),
    "metrics: [confusion]\nclass_counts: false": ("metrics", "class_counts"),
    "only_sums: yes please": ("only_sums",),
    "- only_sums": ("mapping",),
    "methods: fedavg": ("methods", "fedavg"),
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_policy_is_refused_with_key_and_value(tmp_path: Path, text: str) -> None:
    with refusing(ExperimentError, "policy.yaml", *BAD[text]):
        policy(tmp_path, text)


def test_an_unreadable_policy_is_refused(tmp_path: Path) -> None:
    with refusing(ExperimentError, "nowhere.yaml"):
        load_policy(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with refusing(ExperimentError, "bytes"):
        load_policy(tmp_path / "bytes")


def test_sizes_have_units(tmp_path: Path) -> None:
    found = policy(tmp_path, "largest_model: 1.5 MB\ntraffic: {per_round: 2KiB, per_day: 7}").policy
    assert (found.largest_model, found.traffic.per_round, found.traffic.per_day) == (1_500_000, 2048, 7)


def test_an_empty_policy_allows_everything(tmp_path: Path) -> None:
    file = policy(tmp_path, "")
    assert list(refusals(file, experiment())) == []
    assert file.needs_folder is None


def test_the_option_is_a_shorthand_for_the_key(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("hours: 08:00-09:00")
    assert load_policy(tmp_path / "p.yaml", only_sums=True).policy == Policy(hours="08:00-09:00", only_sums=True)
    (tmp_path / "p.yaml").write_text("only_sums: false")
    with refusing(ExperimentError, "only_sums"):
        load_policy(tmp_path / "p.yaml", only_sums=True)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("approve: ask", "approve"),
        ("traffic: {per_day: 1GB}", "traffic.per_day"),
        ("privacy: {epsilon: 1}", "privacy.epsilon"),
        ("privacy: {epsilon_total: 1}", "privacy.epsilon_total"),
    ],
)
def test_what_must_outlive_the_process_needs_a_folder(tmp_path: Path, text: str, key: str) -> None:
    with refusing(ExperimentError, f"policy.yaml:1: {key}", "folder"):
        PolicyEnforcer(policy(tmp_path, text))
    assert policy(tmp_path, text).folder("states") == Path("states")
    assert policy(tmp_path, f"{text}\nfolder: mine").folder("states") == tmp_path / "mine"


def test_class_counts_contradict_the_workers_option(tmp_path: Path) -> None:
    with refusing(ExperimentError, "policy.yaml:1: class_counts"):
        PolicyEnforcer(policy(tmp_path, "class_counts: false"), sends_class_counts=True)
    PolicyEnforcer(policy(tmp_path, "class_counts: true"), sends_class_counts=True)


def test_the_example_of_a_hospital_is_valid_and_refuses_what_it_says() -> None:
    file = load_policy(ROOT / "docs" / "examples" / "member" / "hospital.yaml")
    assert file.policy.model_fields_set == set(Policy.model_fields) - {"factories", "experiments"}
    found = "\n".join(refusals(file, experiment()))
    assert mentions(found, "hospital.yaml:3: only_sums", "hospital.yaml:5: privacy")
    allowed = experiment({"secure_aggregation": SECURE | {"examples": 100}, "privacy": PRIVATE})
    assert list(refusals(file, allowed)) == []


# --- hours and counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("08:00-12:30", ["08:00", "12:29"], ["07:59", "12:30", "23:00"]),
        ("20:00-06:00", ["20:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "19:59"]),
    ],
)
def test_hours_may_pass_midnight(tmp_path: Path, hours: str, inside: list[str], outside: list[str]) -> None:
    file = policy(tmp_path, f"hours: {hours}")
    for text in (*inside, *outside):
        at = datetime.combine(datetime(2026, 11, 29), time.fromisoformat(text))
        closed = PolicyEnforcer(file, now=lambda at=at: at).closed()
        assert (closed is None) == (text in inside), text
        assert closed is None or mentions(closed, "policy.yaml:1: hours", hours)
    assert Hours.parse(hours).contains(time.fromisoformat(inside[0]))


def test_a_days_bytes_are_counted_across_restarts_and_end_at_midnight(tmp_path: Path) -> None:
    now = [datetime(2026, 11, 29, 23, 59)]
    limit = 2_000_000
    file = policy(tmp_path, f"traffic: {{per_day: {limit}}}\nfolder: kept")
    sent = 0
    for _ in range(20):  # each time another process, on another connection
        member = PolicyEnforcer(file, now=lambda: now[0])
        for _ in range(10):
            if member.closed() is None and member.count(50_000, sending=True):
                sent += 50_000
        member.close()
    assert 0 < sent <= limit
    last = PolicyEnforcer(file, now=lambda: now[0])
    assert not last.count(50_000, sending=True)
    assert mentions(str(last.closed()), "policy.yaml:1: traffic.per_day", limit)
    now[0] = datetime(2026, 11, 30, 0, 0)
    assert last.closed() is None
    assert last.count(50_000, sending=True)


def test_a_new_day_has_new_bytes(tmp_path: Path) -> None:
    now = [datetime(2026, 11, 29, 23, 59)]
    usage = Usage(tmp_path, now=lambda: now[0])
    usage.count(10)
    assert usage.today == 10
    now[0] = datetime(2026, 11, 30)
    assert usage.today == 0


def test_a_kill_forgets_no_bytes(tmp_path: Path) -> None:
    usage = Usage(tmp_path, 10**7)
    for _ in range(100):
        usage.count(10_000)
    after = Usage(tmp_path, writes=False)  # as if the first had been killed
    assert 1_000_000 <= after.today <= 1_000_000 + 10**7 // AHEAD + 10_000


def test_two_workers_cannot_count_in_one_folder(tmp_path: Path) -> None:
    first = Usage(tmp_path)
    with refusing(DataError, tmp_path):
        Usage(tmp_path)
    first.close()
    Usage(tmp_path).close()


def test_a_damaged_count_is_refused(tmp_path: Path) -> None:
    usage = Usage(tmp_path)
    usage.count(10)
    usage.close()
    path = tmp_path / RECORD
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1'))
    with refusing(DataError, RECORD):
        Usage(tmp_path)


def test_rounds_that_an_aggregator_invents_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usages, "ROUNDS", 50)
    member = PolicyEnforcer(policy(tmp_path, "traffic: {per_round: 1000}"))
    for round in range(500):
        assert member.charge(ConversationKey(round, 1, 0, "train"), 600) is None
    assert mentions(str(member.charge(ConversationKey(499, 2, 0, "train"), 600)), "traffic.per_round", 1200)
    assert len(member._usage._rounds) == 50


def test_a_rounds_bytes_are_counted_over_repetitions(tmp_path: Path) -> None:
    member = PolicyEnforcer(policy(tmp_path, "traffic: {per_round: 1000}"))
    first, evaluation, second = (
        ConversationKey(r, a, 0, p) for r, a, p in ((1, 0, "train"), (1, 1, "evaluate"), (2, 0, "x"))
    )
    assert member.charge(first, 600) is None
    assert mentions(str(member.charge(evaluation, 600)), "policy.yaml:1: traffic.per_round", 1200)
    assert member.charge(evaluation, 400) is None
    assert member.charge(second, 1000) is None


def test_the_last_bytes_of_a_day_are_for_the_reason(tmp_path: Path) -> None:
    member = PolicyEnforcer(policy(tmp_path, "traffic: {per_day: 10kB}\nfolder: kept"))
    assert member.count(10_000 - RESERVE - 1, sending=True)
    assert member.closed() is None
    assert not member.count(RESERVE + 1, sending=True)
    assert member.closed() is not None
    assert member.count(100, sending=True)


# --- approvals --------------------------------------------------------------------------------------------------------


def test_differences_are_listed_by_key() -> None:
    before = {"a": 1, "b": {"c": True, "d": [1]}, "gone": None}
    after = {"a": 1, "b": {"c": 1, "d": [1, 2]}, "new": {"e": 0.5}}
    assert list(experiment_differences(before, after)) == [
        ("b.c", True, 1), ("b.d", [1], [1, 2]), ("gone", None, MISSING), ("new.e", MISSING, 0.5),
    ]  # fmt: skip


def test_a_changed_experiment_waits_and_shows_what_changed(tmp_path: Path) -> None:
    file = policy(tmp_path, "approve: ask\nfolder: kept")
    member, first = PolicyEnforcer(file, aggregator="host:1"), experiment()
    with pytest.raises(Declined):
        member.admit(first, {})
    digest = experiment_digest(first.shared_json())
    assert mentions(str(member.closed()), "policy.yaml:1: approve", digest)
    approvals = Approvals(tmp_path / "kept")
    approvals.decide(None, "approved")
    assert member.closed() is None
    member.admit(first, {})
    changed = experiment({"clients_per_round": 6})
    with pytest.raises(Declined):
        member.admit(changed, {})
    waiting = approvals.known()[-1]
    assert (waiting.state, waiting.aggregator) == ("waiting", "host:1")
    assert approvals.changes(waiting.experiment, waiting.digest) == [("federation.clients_per_round", 5, 6)]
    approvals.decide(waiting.digest[:6], "refused")
    assert mentions(str(member.closed()), waiting.digest)
    assert member.ended is None  # the experiment of an open federation may change
    member.admit(first, {})  # the one before is still approved


def test_an_unknown_or_ambiguous_experiment_cannot_be_decided(tmp_path: Path) -> None:
    approvals = Approvals(tmp_path)
    with refusing(ExperimentError, "none"):
        approvals.decide(None, "approved")
    for name in ("one", "two"):
        text = json.dumps({"name": name})
        approvals.ask(experiment_digest(text.encode().decode()), text, "host:1")
    with refusing(ExperimentError, *(each.digest for each in approvals.known())):
        approvals.decide(None, "approved")


def test_a_damaged_approval_is_refused(tmp_path: Path) -> None:
    approvals = Approvals(tmp_path)
    approvals.ask("0" * 16, "{}", "host:1")
    path = tmp_path / "experiments" / f"{'0' * 16}.json"
    path.write_text(path.read_text().replace("waiting", "approved"))
    with refusing(DataError, path):
        approvals.state("0" * 16)


def test_listed_experiments_may_run(tmp_path: Path) -> None:
    one = experiment()
    digest = experiment_digest(one.shared_json())
    file = policy(tmp_path, f"approve: listed\nexperiments: [{digest}]")
    assert list(refusals(file, one)) == []
    (found,) = refusals(file, experiment({"rounds": 4}))
    assert mentions(found, "policy.yaml:2: experiments")


def test_the_command_shows_differences_and_decides(
    fedloom: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = Path(policy(tmp_path, "approve: ask\nfolder: kept\nprivacy: {epsilon: 1}").source)
    approvals = Approvals(tmp_path / "kept")
    first, second = (json.dumps({"name": "wards", "federation": {"rounds": n}}) for n in (3, 4))
    approvals.ask(experiment_digest(first), first, "host:1")
    assert fedloom("member", "approve", "--policy", path)[0] == 0
    approvals.ask(experiment_digest(second), second, "host:1")
    usage = Usage(tmp_path / "kept")
    usage.count(1234)
    usage.close()
    code, out, _ = fedloom("member", "show", "--policy", path)
    assert code == 0
    assert mentions(out, experiment_digest(second), "waiting", "federation.rounds: 3 -> 4", "1,234")
    code, out, _ = fedloom("member", "show", "--policy", path, "--json")
    shown = json.loads(out)["experiments"]
    assert [each["state"] for each in shown] == ["approved", "waiting"]
    assert shown[1]["changes"] == [{"key": "federation.rounds", "before": "3", "after": "4"}]
    assert fedloom("member", "refuse", experiment_digest(second)[:8], "--states", tmp_path / "kept")[0] == 0
    assert approvals.state(experiment_digest(second)) == "refused"
    code, _, err = fedloom("member", "approve", "--policy", path)
    assert (code, mentions(err, "exactly one")) == (2, True)
    assert fedloom("member", "show")[0] == 2


def test_the_schema_describes_every_key(fedloom: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = fedloom("member", "schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) == set(Policy.model_fields)
    assert all("description" in each for each in schema["properties"].values())


# --- experiments ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], tuple[object, ...]]] = {
    "method": ("methods: [ditto]", {}, ("methods", "ditto", "fedavg")),
    "no sums": ("only_sums: true", {}, ("only_sums",)),
    "unsigned sums": ("only_sums: true", {"secure_aggregation": {**SECURE, "signatures": "none"}}, ("only_sums",)),
    "weaker graph": (
        "only_sums: true",
        {"secure_aggregation": {**SECURE, "neighbours": 2}},
        ("only_sums", "neighbours"),
    ),
    "small cohort": (
        "only_sums: true\nsmallest_cohort: 9",
        {"secure_aggregation": SECURE},
        ("policy.yaml:2: smallest_cohort", 9, 5),
    ),
    "no privacy": ("privacy: {}", {}, ("privacy", "federation.privacy")),
    "other unit": ("privacy: {unit: clients}", {"privacy": PRIVATE}, ("privacy.unit", "examples")),
    "less noise": ("privacy: {noise_multiplier: 2}", {"privacy": PRIVATE}, ("privacy.noise_multiplier", 2, 1)),
    "trusted noise": ("privacy: {}", {"privacy": {**PRIVATE, "of": "clients"}}, ("central", "distributed")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_policy_refuses_an_experiment_with_its_line(tmp_path: Path, case: str) -> None:
    text, federation, facts = REFUSED[case]
    uniform = {**EXPERIMENT["algorithm"], "weighting": "uniform"}  # which privacy of clients needs
    (found,) = refusals(policy(tmp_path, text), experiment(federation, algorithm=uniform))
    assert mentions(found, "policy.yaml:", *facts)


def test_a_closed_run_ends_the_worker_and_an_open_one_waits(tmp_path: Path) -> None:
    closed = parse_experiment(
        yaml.safe_dump(
            {
                **EXPERIMENT,
                "data": {"dataset": "vowel", "partition": {"scheme": "natural"}},
                "federation": {"rounds": 1, "clients_per_round": 3},
            }
        )
    )
    for one, ends in ((closed, True), (experiment(), False)):
        member = PolicyEnforcer(policy(tmp_path, "only_sums: true"))
        with pytest.raises(Declined):
            member.admit(one, {})
        assert member.closed() is not None
        assert isinstance(member.ended, RefusedError) == ends


def test_code_of_other_packages_needs_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "__init__.py").write_text("")
    (tmp_path / "their_package" / "method.py").write_text("class Theirs: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import their_package.method  # type: ignore[import-not-found]

    before = code_digest(their_package.method.Theirs)
    assert before is not None
    (tmp_path / "their_package" / "helper.py").write_text("x = 1\n")
    assert code_digest(their_package.method.Theirs) != before
    assert code_digest(type(find_algorithm("fedavg"))) is None
    del sys.modules["their_package"], sys.modules["their_package.method"]
    found = list(refusals(policy(tmp_path, f"methods: {{fedavg: '{before}'}}"), experiment()))
    assert mentions("\n".join(found), "policy.yaml:1: methods.fedavg", before)
    assert list(refusals(policy(tmp_path, "methods: {fedavg: }"), experiment())) == []


def test_factories_are_permitted_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_FACTORIES", "theirs:net")
    assert list(code_refusals(policy(tmp_path, "hours: 08:00-09:00"), ["os:system"])) == []  # checked elsewhere
    file = policy(tmp_path, "factories: ['mine:net']")
    assert list(code_refusals(file, ["mine:net", "theirs:net"])) == []
    (found,) = code_refusals(file, ["mine:net", "os:system"])
    assert mentions(found, "policy.yaml:1: factories", "os:system")


def test_a_dry_run_lists_all_refusals_and_touches_nothing(tmp_path: Path) -> None:
    file = policy(tmp_path, "only_sums: true\nprivacy: {epsilon: 1}\nfolder: kept")
    options = WorkerOptions(policy=Path(file.source))
    with pytest.raises(RefusedError) as refused:
        check_allowed(options, experiment(), 40, sends_class_counts=False)
    assert mentions(str(refused.value), "policy.yaml:1: only_sums", "policy.yaml:2: privacy")
    assert not (tmp_path / "kept").exists()


# --- questions and answers --------------------------------------------------------------------------------------------


class Big(Message):
    theta: torch.Tensor = broadcast(Quantity.MODEL)


class Told(Message):
    x: torch.Tensor = rows(Quantity.MODEL_UPDATE, 4)


KEY = ConversationKey(1, 0, 0, "train")


def test_a_large_tensor_is_not_answered(tmp_path: Path) -> None:
    member = PolicyEnforcer(policy(tmp_path, "largest_model: 400"))
    member.question(KEY, Big(torch.zeros(100)), trains=True)
    with refusing(DataError, "policy.yaml:1: largest_model", 404):
        member.question(KEY, Big(torch.zeros(101)), trains=True)


def test_only_sums_leave(tmp_path: Path) -> None:
    member = PolicyEnforcer(only_sums_policy())
    member.answer(KEY, "c", Told(torch.zeros(1, 4)), trains=True, summed=True)
    with refusing(DataError, "Told"):
        member.answer(KEY, "c", Told(torch.zeros(1, 4)), trains=True, summed=False)
    with refusing(RefusedError, "weak"):
        member.cohort(5, "weak")


def test_small_cohorts_are_refused(tmp_path: Path) -> None:
    member = PolicyEnforcer(policy(tmp_path, "only_sums: true\nsmallest_cohort: 4"))
    member.cohort(4, None)
    with refusing(RefusedError, "policy.yaml:2: smallest_cohort", 4, 3):
        member.cohort(3, None)


def test_personalization_answers_are_refused(tmp_path: Path) -> None:
    member = PolicyEnforcer(policy(tmp_path, "personalization: false"))
    evaluation = ConversationKey(1, 0, 0, "evaluate")
    with refusing(DataError, "policy.yaml:1: personalization", "Told"):
        member.answer(evaluation, "c", Told(torch.zeros(1, 4)), trains=False, summed=False)
    with refusing(DataError, "policy.yaml:1: personalization"):
        member.question(ConversationKey(1, 0, 0, "evaluate/3"), Big(torch.zeros(1)), trains=False)
    member.question(evaluation, Big(torch.zeros(1)), trains=False)


def test_measurements_that_may_not_leave_are_zero(tmp_path: Path) -> None:
    plan = EvaluationPlan.of_classes(3)
    measured = plan.nothing(1, 2)
    ones = type(measured)(**{name: torch.ones_like(tensor) for name, tensor in measured.tensors().items()})
    for text, left in (
        ("metrics: [accuracy]", {"counts"}),
        ("metrics: [confusion, ece]", {"confusion", "calibration"}),
        ("class_counts: false", {"counts", "calibration", "uncertainty", "sums", "models"}),
        ("metrics: []", set()),
    ):
        member = PolicyEnforcer(policy(tmp_path, text))
        member.begin(plan)
        found = member.withhold(ones, plan).tensors()
        assert {name for name, tensor in found.items() if tensor.any()} == {
            n for n in left if ones.tensors()[n].numel()
        }


# --- privacy ----------------------------------------------------------------------------------------------------------


def opened(member: PolicyEnforcer, times: int) -> int:
    """Return how many of these conversations a member opens before it refuses."""
    for count in range(times):
        try:
            member.opens(KEY, "c")
        except DataError as error:
            assert mentions(str(error), "policy.yaml:1: privacy.epsilon")  # noqa: PT017
            return count
    return times


def test_the_epsilon_of_a_run_outlives_restarts_and_other_aggregators(tmp_path: Path) -> None:
    private = experiment({"privacy": PRIVATE})
    file = policy(tmp_path, "privacy: {epsilon: 4}\nfolder: kept")
    release = Release(0.1, 1.0, None, None, "poisson")
    allowed = next(n for n in range(1, 10_000) if epsilon_of({release: n}, 1e-5) > 4) - 1
    done = 0
    while True:
        member = PolicyEnforcer(file)
        member.admit(private, {"c": 40})
        step = opened(member, max(1, allowed // 2))
        member.close()
        done += step
        if step < max(1, allowed // 2):
            break
    assert done == allowed


def test_the_total_counts_all_runs(tmp_path: Path) -> None:
    file = policy(tmp_path, "privacy: {epsilon_total: 8}\nfolder: kept")
    step = Release(0.5, 1.0, None, None, "poisson")
    allowed = next(n for n in range(1, 100) if epsilon_of({step: n}, 1e-5, replacing=True) > 8) - 1
    counts = []
    for seed, most in ((1, allowed - 1), (2, 10), (3, 10)):
        member = PolicyEnforcer(file)
        member.admit(experiment({"privacy": PRIVATE}, seed=seed), {"c": 8})
        counts.append(opened(member, most))
        member.close()
    assert counts == [allowed - 1, 1, 0]


def test_the_total_counts_the_trainings_of_a_ledger(tmp_path: Path) -> None:
    file = policy(tmp_path, "privacy: {epsilon_total: 8, ledger: ledger.jsonl}\nfolder: kept")
    step = Release(0.5, 1.0, None, None, "poisson")
    allowed = next(n for n in range(1, 100) if epsilon_of({step: n}, 1e-5, replacing=True) > 8) - 1
    cost = TrainingCost.planned(TrainingPrivacy(**PRIVATE), Counter({step: allowed - 2}))
    member = PolicyEnforcer(file)
    member.admit(experiment({"privacy": PRIVATE}), {"c": 8})
    PrivacyAccountant(tmp_path / "ledger.jsonl").add_training(ClaimedTraining("elsewhere", "0" * 64, cost))
    assert opened(member, 10) == 2
    (tmp_path / "ledger.jsonl").write_text("damaged\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl"):
        member.opens(KEY, "other")


def test_every_noisy_sum_counts_without_amplification(tmp_path: Path) -> None:
    private = experiment(
        {
            "secure_aggregation": SECURE,
            "privacy": {**PRIVATE, "of": "clients", "noise": "distributed", "sampling": "fixed"},
        },
        algorithm={"name": "fedavg", "weighting": "uniform", "local": {"steps": 1, "lr": 0.1}},
    )
    member = PolicyEnforcer(policy(tmp_path, "only_sums: true\nprivacy: {epsilon: 20}\nfolder: kept"))
    member.admit(private, {"c": 4})
    seen = gaussian_release((1 - 1 / 3) ** 0.5)  # a member of the least sum knows its own share of the noise
    allowed = next(n for n in range(1, 1000) if epsilon_of({seen: n}, 1e-5) > 20) - 1
    for _ in range(allowed):
        member.answer(KEY, "c", Told(torch.zeros(1, 4)), trains=True, summed=True)
    with refusing(DataError, "policy.yaml:2: privacy.epsilon"):
        member.answer(KEY, "c", Told(torch.zeros(1, 4)), trains=True, summed=True)


def test_the_bytes_of_a_round_outlive_restarts(tmp_path: Path) -> None:
    file, counts = policy(tmp_path, "traffic: {per_round: 1000}\nfolder: kept"), []
    for _ in range(4):
        member = PolicyEnforcer(file)
        member.admit(experiment(), {"c": 8})
        counts.append([member.charge(KEY, 200) is None for _ in range(2)])
        assert member.charge(ConversationKey(2, 0, 0, "train"), 200) is None  # another round
        member.close()
    assert counts == [[True, True], [True, True], [True, False], [False, False]]


def test_spent_privacy_is_on_disk(tmp_path: Path) -> None:
    usage, privacy = Usage(tmp_path), TrainingPrivacy(**PRIVATE)
    release = Release(0.5, 1.0, None, None, "poisson")
    usage.spend("run", "c", privacy, Counter({release: 3}))
    assert Usage(tmp_path, writes=False).spent("run", "c") == Counter({release: 3})
