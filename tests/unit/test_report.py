"""The report of complete, stopped and damaged runs."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from facts import tells
from run_folders import put, write_run

from fedloom.core.words import as_csv, pluralize
from fedloom.errors import DataError, StorageError
from fedloom.reporting.page import Part, ReportSection
from fedloom.reporting.report import write_report
from fedloom.reporting.report_classes import confusion_matrices, confusion_table_of, uncertainty
from fedloom.reporting.report_results import client_results
from fedloom.reporting.report_setup import time
from fedloom.runs.folder import RunFolder

SECTIONS = [
    "Learning curves", "Results", "Clients", "Confusion matrix", "Calibration", "Descriptors", "Client by client",
    "Data", "Time", "Settings", "Environment",
]  # fmt: skip
FIGURES = [
    "clients.svg", "confusion-seen.svg", "confusion-unseen.svg", "correlation.svg", "descriptors-training.svg",
    "descriptors.svg", "learning-curve.svg", "partition.svg", "reliability.svg", "time.svg", "training-loss.svg",
]  # fmt: skip
pytestmark = pytest.mark.group("report")
UNRENDERED = pytest.mark.usefixtures("unrendered")


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def left_out(page: str) -> dict[str, str]:
    return dict(re.findall(r'<h2>([^<]*)</h2>\s*<p class="notice" data-absent="([^"]*)">', page))


def notices(page: str) -> str:
    return " ".join(re.findall(r'<p class="notice">([^<]*)</p>', page[: page.index("<main>")]))


@pytest.fixture(scope="module")
def pefll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete run with its report."""
    run = write_run(tmp_path_factory.mktemp("runs") / "pefll")
    assert write_report(run) == run / "report.html"
    return run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small", n=6, unseen=2, rounds=(0, 1))


@pytest.fixture
def small(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "r"))


def test_a_complete_run(pefll: Path) -> None:
    page = (pefll / "report.html").read_text()
    assert titles(page) == SECTIONS
    assert left_out(page) == {}
    assert len(page) < 3_000_000
    summary = json.loads((pefll / "summary.json").read_text())
    mean, std = 100 * summary["unseen"]["accuracy_mean"], 100 * summary["unseen"]["accuracy_std"]
    assert f"<td>{mean:.1f} ± {std:.1f}</td>" in page
    blocks = re.findall(r'<th scope="rowgroup"[^>]*>(Round 400 [^<]*)</th>', page)
    assert [block.endswith(", unmasked") for block in blocks] == [True, False]
    assert sorted(p.name for p in (pefll / "figures").iterdir()) == FIGURES
    assert page.count("<figure") == len(FIGURES)
    assert page.count("<table>") == len(re.findall(r'<div class="wide" tabindex="0"><table>', page)) > 0  # it scrolls
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # namespaces, never fetched
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)", page)


@UNRENDERED
def test_the_head_shows_the_result_and_its_cost(tmp_path: Path) -> None:
    cost = {"personal": {"client_steps": 20.0, "payload_up": 104, "payload_down": 708_016}}
    run = write_run(tmp_path / "r", n=20, unseen=5, rounds=(0, 40), new_client=cost)
    page = write_report(run).read_text()
    head = page[page.index("<header>") : page.index("</header>")]
    for group in ("seen", "unseen"):
        statistics = json.loads((run / "summary.json").read_text())[group]
        assert f"{100 * statistics['accuracy_mean']:.1f} %" in head
        assert f"worst decile {100 * statistics['accuracy_worst_decile']:.1f}" in head
    for fact in (
        "15 seen and 5 unseen clients",
        "500 training examples each",
        "10,000",
        "166 MB",
        "20 steps",
        "708\u00a0kB",
    ):
        assert fact in head


@UNRENDERED
def test_the_mean_over_the_last_evaluations_is_beside_the_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", n=20, unseen=5, rounds=(0, 40))
    assert "83.0 to 86.7" not in write_report(run).read_text()
    summary = json.loads((run / "summary.json").read_text())
    late = {"accuracy_mean": {"mean": 0.851, "lowest": 0.8304, "highest": 0.8671}}
    summary["last_evaluations"] = {
        "evaluations": 8,
        "rounds": [4125, 5000],
        "seen": late,
        "unseen": late,
        "global": None,
    }
    put(run / "summary.json", json.dumps(summary))
    page = write_report(run).read_text()
    assert tells(page, "8 evaluations", "4125 to 5000", "unseen clients 85.1 (83.0 to 86.7)")


@UNRENDERED
def test_the_spread_of_the_models_is_told_if_it_was_measured(small: Path) -> None:
    line = json.loads((small / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["spread"] == {"seen": None, "unseen": None}  # clients without sketches
    assert "norm of the mean" not in write_report(small).read_text()
    line["spread"]["unseen"] = {"clients": 2, "distance": 1.5, "relative": 0.1234}
    put(small / "metrics.jsonl", json.dumps(line) + "\n")
    page = write_report(small).read_text()
    assert tells(page, "norm of the mean", "unseen clients 12 %")
    assert "Results" not in left_out(page)


def test_a_point_of_the_map_shows_its_class_mix_and_links_to_its_confusion(small: Path) -> None:
    table = (small / "confusion.csv").read_text().replace("client-0003,", "client-9999,", 1)
    put(small / "confusion.csv", f"{table}client-0005,3,7,123\n")
    page = write_report(small).read_text()
    manifest = RunFolder.open(small).manifest()
    notes = dict(re.findall(r'<a href="#(c\d+)"><title>(client-\d+: [^<]*)</title>', page))
    assert len(notes) == 6
    for k, client in enumerate(manifest.clients):
        counts = client.class_counts["train"]
        first, second = (manifest.spec.class_names[k] for k in (counts.index(260), counts.index(240)))
        assert notes[f"c{k}"] == f"{client.id}: {first} (52 %), {second} (48 %)"
    cards = dict(re.findall(r'<article id="(c\d+)">(.*?)</article>', page, re.DOTALL))
    assert len(cards) == 6
    assert "<td>Dress</td>" in cards["c5"]
    assert ">123</td>" in cards["c5"]
    assert ">123</td>" not in cards["c4"]
    figure = (small / "figures" / "descriptors.svg").read_text()
    assert "<title>client-0000: " in figure
    assert "point:" not in figure + page
    assert "#c0" not in figure


@UNRENDERED
def test_clients_beyond_a_thousand_have_no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.reporting.report_classes.CARDS", 5)
    page = write_report(write_run(tmp_path / "r", n=6, unseen=2, rounds=(0, 1))).read_text()
    assert "<article" not in page
    assert 'href="#c0"' not in page
    assert "Client by client" in titles(page)


def test_a_card_shows_the_most_frequent_classes() -> None:
    pairs = [(k, k, 100 - k) for k in range(30)] + [(0, 29, 1)]
    table = confusion_table_of(pairs, [f"class {k}" for k in range(30)])
    assert table.headings[1:] == tuple(f"class {k}" for k in range(12))
    ((_, rows),) = table.blocks
    label, first, *others = rows[0].cells
    assert (label.text, first.text, first.shade) == ("class 0", "100", 99)
    assert {(cell.text, cell.shade) for cell in others} == {("", 0)}
    assert len(rows) == 12


def test_confusion_numbers_match_the_file(small: Path) -> None:
    document = json.loads((small / "confusion.json").read_text())
    document["personal"]["seen"][3] = [0, 0, 5, 14, 0, 1, 0, 0, 0, 0]  # in twentieths: 25, 70 and 5 percent
    put(small / "confusion.json", json.dumps(document))
    part = confusion_matrices(RunFolder.open(small))
    svg = ElementTree.fromstring(part.panels[0].svg)
    texts = ["".join(node.itertext()).strip() for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"25", "70", "5"} <= set(texts)
    assert set(document["classes"]) <= set(texts)
    ((_, rows),) = part.tables[0].blocks
    assert ("Dress → Pullover", "25.0") in [tuple(cell.text for cell in row.cells[:2]) for row in rows]


def test_clients_before_and_after_personalization(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", algorithm="fedavg", predictors=("personal", "global"), n=6, unseen=2, rounds=(0, 9))
    lines = (run / "clients.csv").read_text().splitlines()
    columns = lines[0].split(",")
    values = [dict(zip(columns, line.split(","), strict=True)) for line in lines[1:]]
    accuracies = [(0.9, 0.5), (0.5, 0.9), (0.7, 0.7), (0.3, 0.2), (0.8, 0.1), (0.6, 0.55)]
    for value, (personal, overall) in zip(values, accuracies, strict=True):
        value |= {"personal_accuracy_unmasked": str(personal), "global_accuracy_unmasked": str(overall)}
    put(run / "clients.csv", "\n".join([lines[0], *(",".join(value.values()) for value in values)]))
    part = client_results(RunFolder.open(run))
    assert re.findall(r"better: (\d)", part.panels[1].svg) == ["4", "1"]
    few, changed = ([row.cells for _, rows in table.blocks for row in rows] for table in part.tables)
    assert [cells[0].text for cells in few] == [f"client-000{i}" for i in (3, 1, 5, 2, 4, 0)]  # all, the worst first
    assert [cells[0].text for cells in changed] == [f"client-000{i}" for i in (1, 2, 5, 3, 0, 4)]
    assert [cells[3].text for cells in changed] == ["-40.0", "+0.0", "+5.0", "+10.0", "+40.0", "+70.0"]


@UNRENDERED
def test_the_page_title_has_method_dataset_and_seed(small: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", algorithm="own-method", seed=7, n=6, unseen=2, rounds=(0, 1))
    for run, title in ((small, "PeFLL on fashion-mnist, seed 1"), (other, "own-method on fashion-mnist, seed 7")):
        page = write_report(run).read_text()
        assert f"<title>{title} · FedLoom</title>" in page
        assert f"<h1>{title}</h1>" in page
    settings = {"seed": 3, "algorithm": {"name": "fedavg"}, "data": {"dataset": "vowel"}}
    (small / "summary.json").unlink()
    put(small / "experiment.yaml", json.dumps(settings))
    assert "<h1>fedavg on vowel, seed 3</h1>" in write_report(small).read_text()


@pytest.mark.parametrize("n", [8, 40])
@UNRENDERED
def test_clients_are_listed_with_owners_and_class_counts(tmp_path: Path, n: int) -> None:
    owners = [f"Hospital <{i}>" for i in range(n)]
    run = write_run(tmp_path / "r", n=n, unseen=2, rounds=(0, 1), owners=owners, ensemble=True)
    with (run / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["owner"] for row in rows] == owners
    for row in rows:
        row["labels"] = "0 1 2 3 4"
    put(run / "clients.csv", as_csv(rows))
    page = write_report(run).read_text()
    table = next(table for table in re.findall(r"<table>.*?</table>", page, re.DOTALL) if "training examples" in table)
    found = re.findall(r"client-0*(\d+)</a><span class=\"note\">Hospital &lt;(\d+)&gt;</span>", table)
    assert len(found) == (n if n <= 20 else 4)
    assert all(int(client) == int(owner) for client, owner in found)
    assert re.findall(r"</span></td><td>[\d.]+</td><td>\d+</td><td>(.*?)</td>", table) == ["5"] * len(found)
    entropy = page[page.index("<h3>Clients of highest entropy") :]
    assert re.findall(r"Hospital &lt;\d+&gt;", entropy[: entropy.index("</table>")])


@UNRENDERED
def test_training_loss_includes_every_round(small: Path) -> None:
    def line(round: int, outcome: str, **statistics: float) -> str:
        return json.dumps({"round": round, "outcome": outcome, "phases": {}, "seconds": 1, "statistics": statistics})

    lines = [
        line(1, "done", loss=9.0),
        line(2, "too few replies"),
        line(1, "done", loss=2.0),
        *(line(t, "done", loss=3.0 - t) for t in (2, 3, 4)),
    ]
    put(small / "journal.jsonl", "\n".join([*lines, line(5, "done", client_steps=4), line(5, "eval")[:9]]))
    assert RunFolder(small).training_loss() == {1: 2.0, 2: 1.0, 3: 0.0, 4: -1.0}
    write_report(small)
    assert (small / "figures" / "training-loss.svg").exists()
    (small / "figures" / "training-loss.svg").unlink()
    put(small / "journal.jsonl", line(1, "done", client_steps=4) + "\n")  # of a method without a loss
    write_report(small)
    assert not (small / "figures" / "training-loss.svg").exists()


@UNRENDERED
def test_values_of_a_method_are_shown_under_any_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", algorithm="own-method", n=6, unseen=2, rounds=(0, 1))
    summary = json.loads((run / "summary.json").read_text())
    summary["own-method"] = {"clusters": 3, "purity": {"mean": 0.123456789}}
    put(run / "summary.json", json.dumps(summary))
    page = write_report(run).read_text()
    assert "Method" in titles(page)
    assert "<dt>clusters</dt><dd>3</dd>" in page
    assert "<dt>purity.mean</dt><dd>0.123457</dd>" in page


def test_a_count_of_one_is_in_the_singular() -> None:
    assert [pluralize(n, "model") for n in (0, 1, 2, 2000)] == ["0 models", "1 model", "2 models", "2,000 models"]
    assert [pluralize(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]


def test_failed_attempts_pauses_and_the_rest_are_part_of_the_time(small: Path) -> None:
    phases = {"descriptors": 1.0, "server": 0.5}
    journal: list[dict[str, object]] = [
        {"round": 1, "attempt": 1, "outcome": "too few replies", "phases": {"descriptors": 4.0}, "seconds": 4.0},
        {"round": 1, "attempt": 2, "outcome": "done", "phases": {"descriptors": 9.0}, "seconds": 9.0},
        {"round": 1, "attempt": 1, "outcome": "done", "phases": phases, "seconds": 1.5},  # again, after a resume
        {"round": 2, "attempt": 1, "outcome": "done", "phases": phases, "seconds": 1.5},
        {"round": 2, "attempt": 0, "outcome": "evaluated", "phases": {}, "seconds": 0.0, "paused": {"seconds": 5.0}},
    ]
    put(small / "journal.jsonl", "".join(json.dumps(line) + "\n" for line in journal))
    summary = json.loads((small / "summary.json").read_text()) | {"duration_s": 25.0}
    put(small / "summary.json", json.dumps(summary))
    svg = time(RunFolder.open(small)).panels[0].svg
    for label in (
        "2.00 s (8%)",
        "1.00 s (4%)",
        "failed attempts",
        "4.00 s (16%)",
        "paused",
        "5.00 s (20%)",
        "13 s (52%)",
    ):
        assert label in svg


@pytest.mark.slow
def test_pages_stay_small_for_a_thousand_clients_and_many_classes(tmp_path: Path) -> None:
    names = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    run = write_run(tmp_path / "r", n=1000, unseen=20, rounds=(0, 5, 9), class_names=names, equal=False)
    page = write_report(run).read_text()
    assert left_out(page) == {}
    assert len(page.encode()) < 1_500_000
    labels = (run / "figures" / "confusion-seen.svg").read_text()
    assert all(f">{name}</text>" in labels for name in names)


def test_invisible_and_ambiguous_characters(tmp_path: Path) -> None:
    names = (" ", "\n", "$", "&", "<", "^", "_", "\\", "%", "q")
    run = write_run(tmp_path / "r", n=6, unseen=2, rounds=(0, 1), class_names=names)
    page = write_report(run).read_text()
    assert left_out(page) == {}
    for path in (run / "figures").iterdir():
        ElementTree.fromstring(path.read_text())
    texts = ElementTree.fromstring((run / "figures" / "confusion-seen.svg").read_text()).itertext()
    assert {"␣", "⏎", "$", "&", "<", "\\"} <= {text.strip() for text in texts}
    assert "<td>␣ → ⏎</td>" in page


@UNRENDERED
def test_data_without_labels(small: Path) -> None:
    manifest = json.loads((small / "partition.json").read_text())
    for client in manifest["clients"]:
        client["class_counts"]["train"] = [0] * 10
    put(small / "partition.json", json.dumps(manifest))
    page = write_report(small).read_text()
    assert left_out(page) == {}
    assert 'aria-label="Data: partition"' not in page


def test_figures_use_the_pages_colours_and_are_standalone(pefll: Path) -> None:
    page = (pefll / "report.html").read_text()
    body = page[page.index("<main>") :]
    assert "currentColor" in body
    for colour in ("#24292f", "#0072b2", "#d55e00", "#fefefe"):
        assert colour not in body
    assert not re.search(r"#000000(?!; stroke-opacity: 0\b)", body)
    ids = re.findall(r' id="([^"]+)"', body)
    assert len(ids) == len(set(ids))
    targets = {each for each in ids if not each.startswith("section-")}  # sections are targets of links from elsewhere
    assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", body)) == targets
    for path in (pefll / "figures").iterdir():
        svg = path.read_text()
        ElementTree.fromstring(svg)
        assert "#24292f" in svg  # a standalone file cannot use the page's colours
        assert "var(" not in svg
        defined = re.findall(r' id="([^"]+)"', svg)
        assert len(defined) == len(set(defined))
        assert all(f"#{name}" in svg for name in defined)


@pytest.mark.slow
def test_equal_files_give_equal_bytes(pefll: Path) -> None:
    written = [*sorted((pefll / "figures").iterdir()), pefll / "report.html"]
    first = [path.read_bytes() for path in written]
    write_report(pefll)
    assert [path.read_bytes() for path in written] == first


@UNRENDERED
def test_a_method_with_a_global_model_and_a_mask(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "r", algorithm="fedavg", predictors=("personal", "global"), label_mask=True, rounds=(0, 2)
    )
    page = write_report(run).read_text()
    assert "Descriptors" not in titles(page)
    assert "all clients, global model" in page
    blocks = re.findall(r'<th scope="rowgroup"[^>]*>(Round 2 [^<]*)</th>', page)
    assert [block.endswith(", unmasked") for block in blocks] == [False, True]
    assert {"confusion-global.svg", "personalization.svg"} <= {path.name for path in (run / "figures").iterdir()}


@pytest.mark.slow
def test_clients_whose_models_are_distributions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", algorithm="pfedbayes", predictors=("personal", "global"), ensemble=True)
    page = write_report(run).read_text()
    assert left_out(page) == {}
    assert titles(page)[4:6] == ["Calibration", "Uncertainty"]
    assert len(page.encode()) < 700_000
    document = json.loads((run / "uncertainty.json").read_text())
    last = document["rounds"][-1]
    order = sorted(range(100), key=lambda i: last["entropy"][i])
    table = page[page.index("<h3>Clients of highest entropy") :]
    assert re.findall(r"client-\d+", table[: table.index("</table>")]) == [f"client-{i:04d}" for i in order[:-11:-1]]
    svg = (run / "figures" / "uncertainty-training.svg").read_text()
    assert re.findall(r"client-\d+", svg) == [f"client-{order[place]:04d}" for place in (0, 25, 50, 74, 99)]
    for shown in ("round 0", "round 50", "round 400", f"H {last['entropy'][order[0]]:.2f}"):
        assert shown in svg
    assert "round 100" not in svg
    last["entropy"] = [None] * 100
    put(run / "uncertainty.json", json.dumps(document))
    section = ReportSection("Uncertainty", uncertainty).page_section(RunFolder.open(run))
    assert tells(section.absent, "uncertainty.json", "round 400")


@pytest.mark.parametrize("algorithm", ["pefll", "local"])
@UNRENDERED
def test_a_run_without_training_or_unseen_clients(tmp_path: Path, algorithm: str) -> None:
    run = write_run(tmp_path / "r", algorithm=algorithm, n=5, unseen=0, rounds=(0,))
    page = write_report(run).read_text()
    assert left_out(page) == {}
    assert "unseen clients, personalized model</td><td>–</td>" in page
    assert not (run / "figures" / "learning-curve.svg").exists()
    if algorithm == "pefll":
        assert json.loads((run / "descriptors.json").read_text())["spearman"] == [None]


@UNRENDERED
def test_a_stopped_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "stopped")
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()[:3]
    put(run / "metrics.jsonl", "\n".join(lines) + "\n" + lines[0][:50])
    page = write_report(run).read_text()
    assert tells(notices(page), "summary.json", "round 100", "1 unreadable line")
    assert left_out(page) == {}


@UNRENDERED
def test_a_run_that_barely_started(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("name: x\n")
    page = write_report(tmp_path).read_text()
    missing = left_out(page)
    assert set(missing) == {*SECTIONS} - {"Descriptors", "Client by client", "Settings"}
    assert missing["Results"] == "metrics.jsonl: has no evaluated round"
    assert str(tmp_path) not in page
    assert "environment.json does not exist" in missing["Environment"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("metrics.jsonl", {"Results", "Learning curves", "Clients", "Client by client", "Calibration"}),
        ("clients.csv", {"Clients", "Client by client"}),
        ("confusion.csv", {"Client by client"}),
        ("partition.json", {"Data", "Descriptors", "Client by client"}),
        ("descriptors.json", {"Descriptors"}),
        ("confusion.json", {"Confusion matrix"}),
        ("calibration.json", {"Calibration"}),
        ("journal.jsonl", {"Time", "Learning curves"}),
        ("environment.json", {"Environment"}),
        ("summary.json", set()),
    ],
)
@UNRENDERED
def test_a_broken_file_affects_only_its_sections(small: Path, file: str, sections: set[str]) -> None:
    (small / file).write_text('{"round": 1, "phases": 3, "map": {}\n')
    page = write_report(small).read_text()
    assert set(left_out(page)) == sections
    assert titles(page) == SECTIONS
    assert ("summary.json" in notices(page)) == (file == "summary.json")


@pytest.mark.parametrize("content", ["", '{"round": 1, "phases": 3, "map": {}}', "[]", "\x00\xff"])
@UNRENDERED
def test_a_report_of_only_broken_files(small: Path, content: str) -> None:
    for file in small.iterdir():
        if file.is_file():
            file.write_bytes(content.encode("latin-1"))
    page = write_report(small).read_text()
    missing = left_out(page)
    assert set(SECTIONS) - set(missing) <= {"Settings"}
    assert all(missing.values())
    assert "summary.json" in notices(page)


@UNRENDERED
def test_a_foreign_line_of_metrics(small: Path) -> None:
    run = small
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    line["seen"] = {"accuracy": 1}
    put(run / "metrics.jsonl", json.dumps(line) + "\n")
    found = left_out(write_report(run).read_text())
    assert tells(found["Results"], "metrics.jsonl", "KeyError")


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError])
def test_unexpected_forms_are_noted(small: Path, error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def build(run: RunFolder) -> Part:
        raise error("accuracy")

    section = ReportSection("Results", build, ("metrics.jsonl", "summary.json")).page_section(RunFolder.open(small))
    assert tells(section.absent, "metrics.jsonl", "summary.json", error.__name__, "accuracy", "copy")
    assert str(small) not in section.absent
    assert caplog.records[0].exc_info is not None  # a defect of the report can be found


WRONG: list[tuple[str, tuple[str | int, ...], object]] = [
    ("summary.json", ("seen", "accuracy_std"), None),
    ("summary.json", ("communication",), []),
    ("summary.json", ("last_evaluations",), 3),
    ("summary.json", ("pefll",), 3),
    ("summary.json", ("algorithm",), []),
    ("confusion.json", ("global",), {"seen": "x"}),
    ("descriptors.json", ("clients", "class", 0), 99),
    ("journal.jsonl", ("phases",), 3),
    ("metrics.jsonl", ("left_out",), 5),
    ("partition.json", ("scheme",), {}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("file", "keys", "value"), WRONG)
@UNRENDERED
def test_unexpected_values_are_no_bugs(small: Path, file: str, keys: tuple[str | int, ...], value: object) -> None:
    first, *others = (small / file).read_text().splitlines() if file.endswith("l") else [(small / file).read_text()]
    document = json.loads(first)
    at = document
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    put(small / file, "\n".join([json.dumps(document), *others]) + "\n")
    assert set(titles(write_report(small).read_text())) >= set(SECTIONS)


@pytest.mark.parametrize(("column", "value"), [(1, "maybe"), (2, "many"), (8, "x"), (8, "nan")])
@UNRENDERED
def test_a_broken_cell_in_the_client_table_is_named(small: Path, column: int, value: str) -> None:
    header, first, *others = (small / "clients.csv").read_text().splitlines()
    cells = first.split(",")
    cells[column] = value
    put(small / "clients.csv", "\n".join([header, ",".join(cells), *others]) + "\n")
    found = left_out(write_report(small).read_text())
    assert all("clients.csv" in output for output in found.values())


@UNRENDERED
def test_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", n=6, unseen=2, rounds=(0, 1), experiment="name: <script>alert(1)</script>\n")
    assert "<script>" not in write_report(run).read_text()


def test_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"experiment\.yaml"):
        write_report(tmp_path)
    with pytest.raises(DataError, match="nowhere"):
        write_report(tmp_path / "nowhere")


@UNRENDERED
def test_an_unwritable_report(small: Path) -> None:
    run = small
    (run / "report.html").mkdir()
    with pytest.raises(StorageError, match=r"report\.html"):
        write_report(run)
    assert not list(run.glob(".*"))
