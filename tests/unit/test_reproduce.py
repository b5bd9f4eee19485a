"""Parts of the results pages, their comparison with published figures, and the leaderboard."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import comparison
import leaderboard
import made
import page_parts
import pages_baselines
import pytest
import reproduce
import results
import yaml
from facts import refusing, tells
from page_parts import PageKeys, Part, Step
from scipy import stats
from summaries import Evaluation, Runs, flat, measured, read, written

from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.search_space import points

ROOT = Path(__file__).parents[2]
PAGES = page_parts.pages()
PARTS = [part for page in PAGES for part in page_parts.page_parts(page).values()]
OUT = Path("/nowhere")


def test_every_page_is_known_and_every_table_has_a_part_or_a_reason() -> None:
    assert PAGES == sorted(results.PAGES) == sorted(path.stem for path in results.RESULTS.glob("*.md"))
    for page in PAGES:
        tables = list(results.PAGES[page].tables(results.published(page)))
        made_again = {number for part in page_parts.page_parts(page).values() for number in part.keys.tables}
        past = set(page_parts.page_keys(page).past)
        assert made_again | past == set(range(1, len(tables) + 1)), page
        assert not made_again & past


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_fedloom_reproduce_with_known_targets(page: str) -> None:
    text = (results.RESULTS / f"{page}.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    commands = [
        line.partition("#")[0].strip() for line in lines if "fedloom " in line or "python" in line or ".sh" in line
    ]
    assert f"fedloom reproduce {page}" in commands
    named = {target for line in commands for target in line.split()[2:] if "/" in target or target in PAGES}
    for line in commands:
        assert line.startswith("fedloom reproduce "), line
    for target in named | set(re.findall(r"`fedloom reproduce (\S+?)`", text)):
        assert reproduce.parts_of(target)


def test_every_program_that_a_document_names_exists() -> None:
    places = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "Makefile")]
    places += [path for folder in ("docs", "experiments", "research") for path in (ROOT / folder).rglob("*")]
    named = {}
    for path in places:
        if path.suffix in {".md", ".yaml", ".py"} or path.name == "Makefile":
            for name in re.findall(r"research/[\w./-]*\.(?:py|sh)\b", path.read_text(encoding="utf-8")):
                named[name] = path
    assert {name: path for name, path in named.items() if not (ROOT / name).exists()} == {}


def runs_of(step: Step) -> dict[str, dict[str, str]]:
    """Return the settings of each run of a command, by its name in the compact file."""
    words = list(step.words)
    values = {
        option: [words[i + 1] for i, word in enumerate(words) if word == option] for option in ("--set", "--grid")
    }
    seeds = words[words.index("--seeds") + 1] if "--seeds" in words else None
    several = bool(values["--grid"]) or seeds is not None
    return {
        f"{step.out}/{point.name}" if several else step.out: dict(flat(point.experiment.model_dump(mode="json")))
        for point in points(ROOT / words[2], values["--set"], seeds, values["--grid"])
    }


def as_number(text: str | None) -> float | str | None:
    try:
        return float(text or "")
    except ValueError:
        return text


@pytest.mark.sampled(8)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.title)
def test_a_part_makes_the_published_runs_with_their_settings(part: Part) -> None:
    published = results.published(part.page)
    steps = list(part.steps(OUT))
    programs = [step.out for step in steps if step.words[:2] != ("fedloom", "run")]
    runs = {
        name: keys for step in steps if step.words[:2] == ("fedloom", "run") for name, keys in runs_of(step).items()
    }
    rows = comparison.published_rows(part, published)
    assert rows or not part.keys.compare
    for line in rows:
        if line.run in runs:
            different = {
                key: (value, runs[line.run].get(key))
                for key, value in line.settings.items()
                if key in runs[line.run] and as_number(runs[line.run][key]) != as_number(value)
            }
            assert different == {}, line.run
        else:
            assert programs, f"{line.run} is published, but no command makes it"
    for quantity in part.keys.compare or ():
        there = [line for line in rows if quantity in line.values]
        assert there, quantity
        for line in there:
            assert math.isfinite(comparison.tolerance(part, line.run, quantity, rows, published)), line.run
    for search, keys in part.keys.chooses.items():
        assert search in {step.out for step in steps}
        assert keys


def part_of(**keys: object) -> Part:
    page = {"machine": "m", "parts": {"one": {"file": "experiments/vowel.yaml", "runs": {"a": "--seeds 1-2"}, **keys}}}
    made_keys = PageKeys.model_validate(page)
    return Part("vowel", "one", made_keys.parts["one"], "m", {})


def run(name: str, seed: str, round: int = 5, **values: float) -> tuple[Evaluation, ...]:
    return (Evaluation(name, seed, {}, round, None, values, {}, recorded="abc"),)


def test_figures_outside_the_tolerance_and_missing_ones_do_not_agree() -> None:
    part = part_of(compare=["seen"], tolerance={"*": {"seen": 1.5}, "a/seed=2": {"seen": 0.5}})
    published = Runs({f"a/seed={s}": run(f"a/seed={s}", str(s), seen=80.0) for s in (1, 2, 3)})
    measured = Runs({f"a/seed={s}": run(f"a/seed={s}", str(s), seen=81.0) for s in (1, 2)})
    found = comparison.compared(part, published, measured, {"a/*": {"seen": 79.0}})
    assert [(each.seed, each.far, each.agrees, each.paper) for each in found] == [
        ("1", 1.5, True, 79.0), ("2", 0.5, False, 79.0), ("3", 1.5, False, 79.0),
    ]  # fmt: skip
    assert [each.seed for each in comparison.compared(part, published, measured, {}, seeds=["2"])] == ["2"]
    assert found[0].commit == "recorded in abc"
    text = reproduce.disagreement([(part, each) for each in found if not each.agrees])
    assert tells(text, "2 figures", "a/seed=2", "81", "80", "a/seed=3", "missing")
    of_another_round = Runs({"a/seed=1": run("a/seed=1", "1", round=4, seen=80.0)})
    assert not any(each.agrees for each in comparison.compared(part, published, of_another_round, {}))


def test_the_tolerance_without_a_declaration_is_the_prediction_interval_of_two_trainings() -> None:
    part = part_of(compare=["seen"])
    values = {("a/lr=1", 1): 80.0, ("a/lr=1", 2): 82.0, ("a/lr=2", 1): 70.0, ("a/lr=2", 2): 76.0}
    published = Runs({f"{name},seed={s}": run(f"{name},seed={s}", str(s), seen=v) for (name, s), v in values.items()})
    found = comparison.compared(part, published, published, {})
    pooled = (2.0 + 18.0) / 2  # variances of the two settings, a degree of freedom each
    assert [each.far for each in found] == pytest.approx([stats.t.ppf(0.975, 2) * math.sqrt(2 * pooled)] * 4)


@pytest.mark.parametrize(
    ("target", "near"),
    [("vowl", "vowel"), ("vowel/method", "methods"), ("vowel/9", "methods"), ("quickstrat/1", "quickstart")],
)
def test_an_unknown_target_is_refused_with_similar_names(target: str, near: str) -> None:
    with refusing(
        ExperimentError, target.rpartition("/")[2] if target.startswith("vowel/") else "there is no page", near
    ):
        reproduce.parts_of(target)


def test_targets_are_pages_parts_and_tables() -> None:
    assert [part.name for part in reproduce.parts_of("vowel")] == ["methods", "search"]
    assert [part.name for part in reproduce.parts_of("vowel/search")] == ["search"]
    assert [part.name for part in reproduce.parts_of("vowel/1")] == ["methods"]


@pytest.mark.parametrize("text", ["x", "3-1", "1,", ""])
def test_malformed_seeds_are_refused(text: str) -> None:
    with refusing(ExperimentError, "--seeds", text):
        reproduce.seed_list(text)


def test_seeds_select_commands_and_must_exist() -> None:
    part = page_parts.page_parts("vowel")["methods"]
    assert [step.words[step.words.index("--seeds") + 1] for step in part.steps(OUT, ["2", "9"])] == ["2", "2"]
    with refusing(ExperimentError, "vowel/methods", "9"):
        list(part.steps(OUT, ["9"]))


def test_an_unknown_name_and_a_damaged_file_of_parts_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with refusing(ExperimentError, "nothing", "one"):
        list(replace(part_of(), keys=part_of(runs={"a": "--set $nothing"}).keys).steps(OUT))
    monkeypatch.setattr(page_parts, "FOLDER", tmp_path)
    for name, text in (
        ("broken", "parts: ["),
        ("empty", "machine: m\nparts: {}"),
        ("typo", "machine: m\nparts: {a: {rnus: 1}}"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
        with refusing(ExperimentError, name):
            page_parts.page_parts(name)


def test_runs_carry_the_commits_that_made_them(tmp_path: Path) -> None:
    step = Step("a", ("fedloom", "run", "x"))
    assert not made.ended(tmp_path, step)
    made.note(tmp_path, step, event="begin")
    assert not made.ended(tmp_path, step)
    made.note(tmp_path, step, event="end")
    assert made.ended(tmp_path, step)
    assert not made.ended(tmp_path, Step("a", ("fedloom", "run", "y")))
    with (tmp_path / made.MADE).open("a") as file:
        file.write('{"out": "a", "commit": "0123abcd"}\n{"out": "a", "com')  # a kill within a line
    runs = made.with_commits(tmp_path, Runs({"a/seed=1": run("a/seed=1", "1", seen=1.0), "b": run("b", "1", seen=1.0)}))
    assert runs["b"][0].commit == ""
    assert runs["a/seed=1"][0].commit.split() == [each for each in (made.commit(), "0123abcd") if each]
    file = tmp_path / "page.csv"
    file.write_text(written(runs))
    assert {name: (line.commit, line.recorded) for name, (line,) in read(file).items()} == {
        name: (line.commit, line.recorded) for name, (line,) in runs.items()
    }


def test_every_published_run_has_an_origin() -> None:
    for page in results.PAGES:
        for name, lines in results.published(page).items():
            origin = lines[0].commit or lines[0].recorded
            assert re.fullmatch(r"[0-9a-f]{8}\+?( [0-9a-f]{8}\+?)*", origin), (page, name)


def test_words_stand_for_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "clip").write_text("0.6\n")
    for seed in (2, 1):
        (tmp_path / f"seed={seed}").mkdir()
    assert reproduce.expanded(f"@{tmp_path}/clip") == ["0.6"]
    assert reproduce.expanded(f"{tmp_path}/seed=*") == [f"{tmp_path}/seed=1", f"{tmp_path}/seed=2"]
    for word in (f"@{tmp_path}/none", f"{tmp_path}/none-*"):
        with refusing(DataError, "none"):
            reproduce.expanded(word)


GROUP = {f"accuracy_{key}": 0.5 for key in ("pooled", "mean", "std", "worst", "worst_decile")} | {"loss_mean": 1.0}
LINE = {
    "validation_pooled": 0.5,
    **{group: {**GROUP, "masked": GROUP, "seen": GROUP, "unseen": GROUP} for group in ("seen", "unseen", "global")},
}
"""Line of metrics.jsonl with all that a fold measures in every task."""


def test_a_fold_measures_what_is_compared() -> None:
    for part in PARTS:
        page = results.PAGES[part.page]
        if (page.folded is None and page.more is None) or part.title == "pfedbayes/cifar10":  # others measure more
            assert set(part.keys.compare or ()) <= measured(LINE).keys(), part.title


def test_every_run_of_cifar10_is_compared() -> None:
    part = next(part for part in PARTS if part.title == "pfedbayes/cifar10")
    published = results.published("pfedbayes")
    found = comparison.compared(part, published, published, {})
    assert {each.run for each in found} == {line.run for line in comparison.published_rows(part, published)}


def test_list_and_commands_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.reproduce([], runs=OUT, as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [each["part"] for each in listed] == [part.title for part in PARTS]
    assert all(each["seconds"] is None or each["seconds"] > 0 for each in listed)
    reproduce.reproduce(["vowel/methods"], runs=OUT, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fedloom data fetch vowel"
    assert lines[1] == f"fedloom run experiments/vowel.yaml --out {OUT}/vowel/fedavg --seeds 1-3"
    assert len(lines) == 3
    reproduce.reproduce(["pfedbayes/tune-cifar10"], runs=OUT, dry_run=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "/tune-cifar10/pfedbayes " in line]
    assert [line.endswith(" --resume") for line in lines] == [False, True, True]  # they share a folder


def test_ranks_have_the_range_that_certain_differences_leave() -> None:
    noise = {"1": 0.1, "2": -0.1, "3": 0.0, "4": 0.05}
    found, certain = leaderboard.standings(
        {
            "best": {seed: 90 + 2 * each for seed, each in noise.items()},
            "middle": {seed: 80 - each for seed, each in noise.items()},
            "like it": {seed: 80 + each for seed, each in noise.items()},
        }
    )
    assert sorted(certain) == [("best", "like it"), ("best", "middle")]
    assert {name: (each.rank, each.first, each.last) for name, each in found.items()} == {
        "best": (1, 1, 1), "middle": (3, 2, 3), "like it": (2, 2, 3),
    }  # fmt: skip
    reversed_, worse = leaderboard.standings(
        {"a": {"1": 1.0, "2": 1.1}, "b": {"1": 2.0, "2": 2.1}}, lower_is_better=True
    )
    assert (reversed_["a"].rank, worse) == (1, [("a", "b")])


def test_boards_have_equal_seeds_and_name_real_runs() -> None:
    for board in leaderboard.boards():
        runs = read(results.RESULTS / f"{board.page}.csv")
        for reading, quantity in board.readings.items():
            found = board.results(runs, quantity)
            assert len(found) > 1, (board.name, reading)
            assert len({tuple(sorted(values)) for values in found.values()}) == 1, (board.name, reading)


def test_files_of_parts_have_no_unused_texts() -> None:
    for page in PAGES:
        text = (page_parts.FOLDER / f"{page}.yaml").read_text(encoding="utf-8")
        for name in yaml.safe_load(text).get("texts", {}):
            assert re.search(rf"\${name}\b", text), (page, name)


def test_patterns_of_paper_figures_match_published_runs() -> None:
    for page, about in results.PAGES.items():
        names = list(results.published(page))
        unused = [pattern for pattern in about.paper if not any(fnmatchcase(name, pattern) for name in names)]
        assert set(unused) <= {f"table-1/{test}/{method}/*" for test, method in pages_baselines.NOT_RUN}, page
