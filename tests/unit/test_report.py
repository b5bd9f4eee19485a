"""The report of whole, stopped and damaged runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_folders import write_run

from fedloom.errors import DataError, StorageError
from fedloom.evaluation.report import write_report

SECTIONS = ["Results", "Accuracy", "Clients", "Descriptors", "Time", "Settings", "Data", "Environment"]


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def left_out(page: str) -> dict[str, str]:
    return dict(re.findall(r'<h2>([^<]*)</h2>\s*<p class="notice">Left out: ([^<]*)</p>', page))


@pytest.fixture(scope="module")
def pefll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "pefll")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small", n=6, unseen=2, rounds=(0, 1))


@pytest.fixture
def small(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "r"))


def test_a_whole_run(pefll: Path) -> None:
    path = write_report(pefll)
    page = path.read_text()
    assert path == pefll / "report.html"
    assert titles(page) == SECTIONS
    assert left_out(page) == {}
    assert len(page) < 3_000_000
    summary = json.loads((pefll / "summary.json").read_text())
    mean, std = 100 * summary["unseen"]["accuracy_mean"], 100 * summary["unseen"]["accuracy_std"]
    assert f"<td>{mean:.1f} ± {std:.1f}</td>" in page
    for block in ("Round 400 (last), unmasked", "Round 400 (last), masked", "best by validation"):
        assert block in page
    assert "the round of" not in page
    figures = sorted(p.name for p in (pefll / "figures").iterdir())
    assert figures == ["accuracy.svg", "clients.svg", "descriptors.svg", "phases.svg"]


def test_the_page_asks_nobody_for_anything(pefll: Path) -> None:
    page = write_report(pefll).read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, never fetched
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)", page)


def test_figures_take_the_colours_of_the_page_and_stand_alone(pefll: Path) -> None:
    page = write_report(pefll).read_text()
    body = page[page.index("<main>") :]
    assert "currentColor" in body
    for colour in ("#24292f", "#0072b2", "#d55e00"):
        assert colour not in body
    assert not re.search(r"#000000(?!; stroke-opacity: 0\b)", body)
    for path in (pefll / "figures").iterdir():
        svg = path.read_text()
        ElementTree.fromstring(svg)
        assert "#24292f" in svg  # a file of its own has no page to take colours from
        assert "var(" not in svg
        defined = re.findall(r' id="([^"]+)"', svg)
        assert len(defined) == len(set(defined))
        assert all(f"#{name}" in svg for name in defined)


def test_the_same_files_give_the_same_bytes(pefll: Path) -> None:
    written = [*sorted((pefll / "figures").iterdir()), pefll / "report.html"]
    write_report(pefll)
    first = [path.read_bytes() for path in written]
    write_report(pefll)
    assert [path.read_bytes() for path in written] == first


def test_a_method_with_a_global_model_and_a_mask(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "r", algorithm="fedavg", predictors=("personal", "global"), label_mask=True, rounds=(0, 2)
    )
    page = write_report(run).read_text()
    assert "Descriptors" not in titles(page)
    assert "all clients, global model" in page
    assert page.index("Round 2 (last), masked") < page.index("Round 2 (last), unmasked")
    assert "test accuracy (masked, last evaluation)" in page


def test_a_run_without_training_or_unseen_clients(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", algorithm="local", n=5, unseen=0, rounds=(0,))
    page = write_report(run).read_text()
    assert left_out(page) == {}
    assert "unseen clients, own model</td><td>–</td>" in page


def test_descriptors_without_unseen_clients(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", n=5, unseen=0, rounds=(0,))
    assert json.loads((run / "descriptors.json").read_text())["spearman"] == [None]
    assert left_out(write_report(run).read_text()) == {}


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "stopped")
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()[:3]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:50])
    page = write_report(run).read_text()
    assert "This run is not finished" in page
    assert "the results are those of round 100" in page
    assert "1 unreadable line(s)" in page
    assert left_out(page) == {}


def test_a_run_that_did_hardly_start(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("name: x\n")
    page = write_report(tmp_path).read_text()
    missing = left_out(page)
    assert set(missing) == {"Results", "Accuracy", "Clients", "Time", "Data", "Environment"}
    assert missing["Results"] == "metrics.jsonl: is not there"
    assert str(tmp_path) not in page
    assert "environment.json: is not there" in missing["Environment"]


@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("metrics.jsonl", {"Results", "Accuracy"}),
        ("clients.csv", {"Clients"}),
        ("partition.json", {"Data", "Descriptors"}),
        ("descriptors.json", {"Descriptors"}),
        ("journal.jsonl", {"Time"}),
        ("environment.json", {"Environment"}),
        ("summary.json", set()),
    ],
)
def test_a_broken_file_costs_its_sections_only(small: Path, file: str, sections: set[str]) -> None:
    (small / file).write_text('{"round": 1, "phases": 3, "map": {}')
    page = write_report(small).read_text()
    assert set(left_out(page)) == sections
    assert titles(page) == SECTIONS
    assert ("not finished" in page) == (file == "summary.json")


@pytest.mark.parametrize("content", ["", '{"round": 1, "phases": 3, "map": {}}', "[]", "\x00\xff"])
def test_a_report_of_nothing_but_broken_files(small: Path, content: str) -> None:
    for file in small.iterdir():
        if file.is_file():
            file.write_bytes(content.encode("latin-1"))
    page = write_report(small).read_text()
    readable = {"Environment"} if content.startswith("{") else set()  # any object is an environment
    missing = left_out(page)
    assert set(SECTIONS) - set(missing) <= readable | {"Settings"}
    assert all(missing.values())
    assert "not finished" in page


def test_a_line_of_metrics_from_elsewhere(small: Path) -> None:
    run = small
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    line["seen"] = {"accuracy": 1}
    (run / "metrics.jsonl").write_text(json.dumps(line))
    found = left_out(write_report(run).read_text())
    assert "not what FedLoom writes (KeyError" in found["Results"]


def test_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", n=6, unseen=2, rounds=(0, 1), experiment="name: <script>alert(1)</script>\n")
    assert "<script>" not in write_report(run).read_text()


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found no experiment\.yaml"):
        write_report(tmp_path)
    with pytest.raises(DataError, match="found no such folder"):
        write_report(tmp_path / "nowhere")


def test_a_report_that_cannot_be_written(small: Path) -> None:
    run = small
    (run / "report.html").mkdir()
    with pytest.raises(StorageError, match=r"report\.html: cannot be written"):
        write_report(run)
    assert not list(run.glob(".*"))
