"""`fedloom new`: each template runs as its README says, in the folder that was written; nothing is ever overwritten."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import helm
import pytest
import yaml
from facts import tells
from ports import free_port
from run_processes import WAIT_S
from typer.testing import CliRunner
from vowel_data import vowel_root

from fedloom.cli.main import app
from fedloom.cli.new import TEMPLATES, Template, missing_extras, templates, write_template
from fedloom.errors import ExperimentError, StorageError
from fedloom.experiment import load_experiment
from fedloom.member.policy import load_policy

ROOT = Path(__file__).parents[2]
NAMES = [template.name for template in templates()]
README_S = 1500.0
"""Bound of the commands of a README, some of which start ten processes, on a busy machine."""


def new(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["new", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_shell(folder: Path, programs: Path = Path(sys.executable).parent, **more: str) -> dict[str, str]:
    """Return a shell's environment; ``programs`` is the folder with ``fedloom`` and ``python``."""
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "FEDLOOM_DATA": str(vowel_root(folder.parent / "data")),
        "FEDLOOM_REPORT": "0",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        **more,
    }


def followed(name: str, folder: Path, programs: Path = Path(sys.executable).parent, **more: str) -> str:
    """Write a template and run the commands of its README in a shell; return what they print."""
    new(name, folder)
    return follow(folder, programs, **more)


def follow(folder: Path, programs: Path, **more: str) -> str:
    """Run the commands of a written template's README in a shell; return what they print."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    given = in_shell(folder, programs, **more)
    command = ["bash", "-euc", "\n".join(blocks)]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=README_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- the command


def test_templates_are_listed_with_a_sentence_each() -> None:
    assert set(NAMES) == {path.name for path in TEMPLATES.iterdir()}
    listed = json.loads(new("--json"))
    assert [each["name"] for each in listed] == NAMES
    assert all(each["summary"] and "README.md" in each["files"] for each in listed)
    text = " ".join(new().split())
    assert all(each["name"] in text for each in listed)


def test_the_extras_that_a_template_needs_are_told_if_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_extras([extra for template in templates() for extra in template.extras]) == []
    assert "pip install" not in new("comparison", tmp_path / "all")
    there = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda name: () if name == "scipy" else there(name=name))
    assert missing_extras(["report", "compare", "pfnm"]) == ["compare", "pfnm"]
    assert missing_extras(["notebook"]) == ["notebook"], "an extra of an extra"
    assert tells(new("comparison", tmp_path / "some"), "pip install 'fedloom[compare]'")


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_written_as_it_is_and_only_once(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "mine"
    told = json.loads(new(name, folder, "--json"))
    assert (told["name"], told["folder"]) == (name, str(folder))
    expected = {path: text for path, text in content(TEMPLATES / name).items() if "__pycache__" not in path}
    assert content(folder) == expected
    assert sorted(told["files"]) == sorted(expected)
    (folder / "README.md").write_text("mine")
    with pytest.raises(ExperimentError) as refused:
        new(name, folder)
    assert refused.value.key == "dir"
    assert content(folder) == {**expected, "README.md": b"mine"}


def test_a_template_is_written_into_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new("comparison", ".")
    assert content(tmp_path) == content(TEMPLATES / "comparison")


def test_an_unknown_template_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as unknown:
        new("comparisons", tmp_path / "mine")
    assert (unknown.value.key, unknown.value.found, unknown.value.allowed) == ("template", "comparisons", NAMES)
    assert tells(str(unknown.value), *NAMES)
    with pytest.raises(ExperimentError) as missing:
        new("../templates/comparison", tmp_path / "mine")
    assert missing.value.allowed == NAMES
    with pytest.raises(ExperimentError) as missing:
        new("comparison")
    assert missing.value.key == "dir"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExperimentError) as refused:
        new("comparison", tmp_path / "file")
    assert refused.value.found == str(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "file" / "mine", tmp_path / "link", tmp_path / ("n" * 300), Path("/proc/mine")):
        with pytest.raises(StorageError) as failed:
            new("comparison", place)
        assert str(place) in str(failed.value)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_what_was_written_is_removed_after_a_failure(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "above" / "mine"
    if there:
        folder.mkdir(parents=True)
    twice = Template("comparison", "", ("README.md", "compare.sh", "README.md"))
    with pytest.raises(StorageError):
        write_template(twice, folder)
    assert [path.name for path in tmp_path.rglob("*")] == (["above", "mine"] if there else [])


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_is_short_and_names_files_of_its_template(name: str) -> None:
    text = (TEMPLATES / name / "README.md").read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) < 30
    for file in re.findall(r"`([\w/-]+\.(?:py|sh|yaml))`", text):
        assert (TEMPLATES / name / file).exists(), file


# ---- as the READMEs say


def check_comparison(folder: Path, printed: str) -> None:
    """Check the results of the template `comparison`, which test_wheel.py follows."""
    assert (folder / "results" / "comparison" / "compare.html").exists()
    with (folder / "results" / "comparison" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"FedAvg + fine-tuning", "Ditto", "Local"} <= {row["label"] for row in rows}
    assert "Unseen clients: " in printed


MODULES = {"module-arrays": (0.9, 0.75), "module-table": (0.75, 0.75), "module-images": (0.9, 0.9)}
"""Accuracy of seen and unseen clients that the templates with a module exceed; test_wheel.py follows two of them."""


def check_module(name: str, folder: Path) -> None:
    """Check the results of a template with a module."""
    (path,) = (folder / "runs").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["model"].startswith("module")
    for group, accuracy in zip(("seen", "unseen"), MODULES[name], strict=True):
        assert summary[group]["accuracy_mean"] > accuracy


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_module_of_ones_own(tmp_path: Path) -> None:
    followed("module-arrays", tmp_path / "mine")
    check_module("module-arrays", tmp_path / "mine")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_hospitals(tmp_path: Path) -> None:
    folder, port = tmp_path / "mine", free_port()
    printed = followed("hospitals", folder, LISTEN=f"127.0.0.1:{port}", AGGREGATOR=f"localhost:{port}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["seen"]["clients"], summary["rounds"]) == (2, 20)
    assert summary["seen"]["accuracy_mean"] > 0.75
    for name in ("hospital-a", "hospital-b"):
        assert {"last.safetensors", "best.safetensors"} <= set(content(folder / name / "models" / name))
    audit = [json.loads(line) for line in (folder / "run" / "logs" / "audit.jsonl").read_text().splitlines()]
    joined = {(each["identity"], each["credential"].split()[0]) for each in audit if each["event"] == "join"}
    assert joined == {("hospital-a", "certificate"), ("hospital-b", "certificate")}
    assert tells(printed, "policy.yaml:", "confusion"), "the policy withholds what it does not name"


@pytest.mark.slow
def test_a_hospital_cannot_pose_as_the_other(tmp_path: Path) -> None:
    folder, port = tmp_path / "mine", free_port()
    new("hospitals", folder)
    environment = in_shell(folder, LISTEN=f"127.0.0.1:{port}", AGGREGATOR=f"localhost:{port}")
    script = """
        python sample.py
        sh certificates.sh
        sh aggregator.sh & aggregator=$!
        trap 'kill -9 $aggregator' EXIT
        fedloom data pack hospital-b/patients.csv --out stolen --id hospital-b --experiment federation.yaml
        code=0
        sh member.sh hospital-a --data stolen || code=$?
        echo "code $code"
    """
    command = ["bash", "-euc", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.endswith("code 4\n"), done.stdout + done.stderr
    assert tells(done.stderr, "hospital-a", "hospital-b")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment of its own, which sees what is installed in ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(site) / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for module in ("fedloom", "pytest"):
        script = folder / "bin" / module
        script.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {module} "$@"\n')
        script.chmod(0o755)
    return folder / "bin"


OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_CACHE_DIR": "1"}
"""Settings with which pip installs a package by the build backend that is here."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_method_of_ones_own(tmp_path: Path, programs: Path) -> None:
    folder = tmp_path / "mine"
    printed = followed("method", folder, programs, **OFFLINE)
    assert "1 passed" in printed
    (path,) = (folder / "runs").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["algorithm"] == "my-median"
    assert summary["seen"]["accuracy_mean"] > 0.8 > summary["global"]["accuracy_mean"]
    changed = folder / "my_method" / "median.py"
    changed.write_text(changed.read_text().replace(".median(0).values", ".mean(0)"))
    done = subprocess.run([programs / "pytest", "tests"], cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    assert "1 failed" in done.stdout, "its test detects another method"


@pytest.mark.exhaustive
def test_the_method_passes_the_conformance_kit(tmp_path: Path, programs: Path) -> None:
    new("method", tmp_path / "mine")
    install = [programs / "pip", "install", "-e", tmp_path / "mine"]
    subprocess.run(install, env={**os.environ, **OFFLINE}, check=True, capture_output=True, timeout=WAIT_S)
    found = re.search(r"`pytest (tests/conformance [^`]*)`", (TEMPLATES / "method" / "README.md").read_text())
    assert found is not None
    command = [programs / "pytest", "-q", "-x", "-p", "no:cacheprovider", *found[1].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 15


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.group("pipelines")
def test_the_pipeline(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    followed("pipeline", folder)
    compiled, platform = yaml.safe_load_all((folder / "personalized_federation.yaml").read_text())
    assert compiled["pipelineInfo"]["name"] == "personalized-federation"
    executors = compiled["deploymentSpec"]["executors"]
    resources = executors["exec-federate"]["container"]["resources"]
    assert (resources["resourceCpuLimit"], resources["resourceMemoryLimit"]) == ("2", "4Gi")
    assert platform["platforms"]
    summary = json.loads((folder / "out" / "run" / "summary.json").read_text())
    assert (summary["algorithm"], summary["rounds"], summary["unseen"]["clients"]) == ("fedavg", 20, 3)
    assert summary["seen"]["accuracy_mean"] > 0.6
    assert (folder / "out" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.group("helm")
def test_the_chart(tmp_path: Path) -> None:
    folder, programs = tmp_path / "mine", tmp_path / "programs"
    programs.mkdir()
    (programs / "helm").symlink_to(helm.helm())
    followed("chart", folder, programs, CHART=str(helm.CHART))
    found = {}
    for name in ("closed", "open", "member"):
        objects = helm.objects((folder / f"{name}-objects.yaml").read_text())
        found[name] = {(each["kind"], each["metadata"]["name"]) for each in objects}
        for each in objects:
            if each["kind"] == "ConfigMap" and "experiment.yaml" in each["data"]:
                (tmp_path / "experiment.yaml").write_text(each["data"]["experiment.yaml"])
                load_experiment(tmp_path / "experiment.yaml")
            if each["kind"] == "ConfigMap" and "policy.yaml" in each["data"]:
                (tmp_path / "policy.yaml").write_text(each["data"]["policy.yaml"])
                load_policy(tmp_path / "policy.yaml")
    workers = {name: {kind for kind, named in objects if named.endswith("-worker")} for name, objects in found.items()}
    assert "Deployment" in workers["closed"]
    assert not workers["open"] & {"Deployment", "StatefulSet"}
    assert "StatefulSet" in workers["member"]
    assert not any(named.endswith("-aggregator") for _, named in found["member"])
    assert (tmp_path / "policy.yaml").exists()
