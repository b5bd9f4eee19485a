"""Sources of the images: linted, pinned, labelled, and consistent with the rest of the repository.

``tests/integration/test_images.py`` builds and runs them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from cryptography.hazmat.bindings import _rust
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedloom
from fedloom.cluster.manifests import PORT, USER
from fedloom.cluster.settings import check_image
from fedloom.kubeflow.catalog import IMAGE_VARIABLE, component_image

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "images" / "Dockerfile"
_spec = importlib.util.spec_from_file_location("slim", ROOT / "images" / "slim.py")
assert _spec is not None
assert _spec.loader is not None
slim = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slim)
LABELS = {f"org.opencontainers.image.{word}" for word in ("title", "description", "licenses", "version", "revision")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@dataclass
class Stage:
    """One stage of the Dockerfile: its base, and its instructions in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str | None:
        return next((rest for word, rest in reversed(self.steps) if word == instruction), None)


def stages() -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the arguments before the first stage, and the stages."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            stage = found[name] = Stage(name, base)
        elif stage is None:
            assert word == "ARG", line
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stage.steps.append((word, rest.strip()))
    return arguments, found


def lineage(found: dict[str, Stage], name: str) -> list[Stage]:
    """Return a stage and its bases."""
    chain = [found[name]]
    while chain[-1].base in found:
        chain.append(found[chain[-1].base])
    return chain


def bake() -> tuple[dict[str, str], dict[str, str]]:
    """Return the defaults of docker-bake.hcl's variables, and each target's own text."""
    text = (ROOT / "docker-bake.hcl").read_text()
    variables = dict(re.findall(r'^variable "(\w+)" \{\n  default = "(.*)"\n\}', text, re.MULTILINE))
    targets = dict(re.findall(r'^target "([\w-]+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL))
    return variables, targets


def pins() -> dict[str, str]:
    """Return the versions in images/constraints.txt."""
    lines = (ROOT / "images" / "constraints.txt").read_text().splitlines()
    return {m[1]: m[2] for line in lines if (m := re.fullmatch(r"([a-z0-9-]+)==(\S+) \\", line))}


def test_hadolint_reports_nothing() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(DOCKERFILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_hadolint_reports_a_faulty_dockerfile() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", "-"]
    bad = "FROM python:latest\nRUN pip install torch\n"
    done = subprocess.run(command, cwd=ROOT, input=bad, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert {"DL3007", "DL3013"} <= set(re.findall(r"DL\d+", done.stdout))


@pytest.mark.parametrize("image", ["aggregator", "components"])
def test_images_that_run_rounds_include_the_privacy_accountant(image: str) -> None:
    """Without the extra, a pod would reject an experiment with federation.privacy."""
    _, found = stages()
    steps = " ".join(text for stage in lineage(found, image) for word, text in stage.steps if word == "RUN")
    asked = {extra for needs in re.findall(r"install.sh needs ([a-z0-9 ]+)", steps) for extra in needs.split()}
    assert {"privacy", "s3", "tracing", "metrics"} <= asked
    assert {"dp-accounting", "scipy"} <= set(pins())


def test_every_external_image_has_a_tag_and_a_digest() -> None:
    arguments, found = stages()
    outside = {stage.base for stage in found.values()} - {*found, "scratch"}
    assert outside == {"${BASE}"}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", arguments["BASE"])
    check_image(arguments["BASE"])
    taken = [
        source for stage in found.values() for _, rest in stage.steps for source in re.findall(r"from=(\w+)", rest)
    ]
    assert set(taken) == {"tools", "wheel", "build"} <= {*found}


@pytest.mark.parametrize("name", ["worker", "aggregator", "components"])
def test_every_image_has_a_numeric_user_and_labels(name: str) -> None:
    _, found = stages()
    stage = found[name]
    assert stage.last("USER") == f"{USER}:{USER}"
    words = [word for word, _ in stage.steps]
    assert "RUN" not in words[words.index("USER") :]
    label = dict(item.split("=", 1) for item in shlex.split(stage.last("LABEL") or ""))
    assert {*label} == LABELS
    assert all(label.values())
    assert label["org.opencontainers.image.licenses"] == PROJECT["license"]
    entry = [e for part in lineage(found, name) if (e := part.last("ENTRYPOINT")) is not None]
    if name == "components":  # Kubeflow replaces the entire command
        assert entry == []
        assert all(part.last("CMD") is None for part in lineage(found, name))
    else:
        assert [json.loads(e) for e in entry] == [["fedloom"]]
        assert json.loads(stage.last("CMD") or "") == [name, "--help"]
    environment = " ".join(rest for part in lineage(found, name) for word, rest in part.steps if word == "ENV")
    assert {"HOME=/work", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"} <= set(environment.split())


def test_the_aggregator_reports_its_address() -> None:
    assert stages()[1]["aggregator"].last("EXPOSE") == str(PORT)


def test_bake_tags_every_image_with_the_repositorys_version(monkeypatch: pytest.MonkeyPatch) -> None:
    variables, targets = bake()
    assert variables == {"REGISTRY": "", "VERSION": PROJECT["version"], "REVISION": "unknown"}
    assert {*targets} == {"common", "worker", "worker-cuda", "aggregator", "components"}
    assert 'dockerfile = "images/Dockerfile"' in targets.pop("common")
    _, found = stages()
    for name, text in targets.items():
        (stage,) = re.findall(r'^  target +?= "(\w+)"$', text, re.MULTILINE)
        assert "inherits" in text
        assert f'["${{REGISTRY}}fedloom/{name}:${{VERSION}}"]' in text
        assert ("ARG", f"VERSION={PROJECT['version']}") in found[stage].steps
    # Pipelines are compiled for the images built here.
    monkeypatch.delenv(IMAGE_VARIABLE, raising=False)
    assert component_image() == f"fedloom/components:{fedloom.__version__}"
    assert fedloom.__version__ == PROJECT["version"]


def test_the_build_context_has_only_the_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = {
        source
        for stage in stages()[1].values()
        for word, rest in stage.steps
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == given
    assert all((ROOT / path).exists() for path in given)


def test_everything_installed_is_pinned() -> None:
    """Everything that this project requires, also indirectly, is in the constraints with a compatible version."""
    pinned = pins()
    text = (ROOT / "images" / "constraints.txt").read_text()
    assert len(re.findall(r"^\S+==", text, re.MULTILINE)) == len(pinned) > 50
    assert all("--hash=sha256:" in block for block in re.split(r"\n(?=\S)", text)[1:])
    reported = dict(rest.split("=", 1) for rest in _arguments() if "=" in rest)
    pinned["torch"] = reported["TORCH_VERSION"]  # its index determines the build

    missing, seen = [], set()
    todo = [(Requirement("fedloom"), {"kubeflow", "metrics", "tracing"})]
    while todo:
        wanted, extras = todo.pop()
        name = canonicalize_name(wanted.name)
        if (name, *sorted(extras)) in seen:
            continue
        seen.add((name, *sorted(extras)))
        found = pinned.get(name)
        if name != "fedloom" and (found is None or not wanted.specifier.contains(found)):
            missing.append(f"{wanted}: found {found}")
        try:
            needs = requires(wanted.name) or []
        except PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            given = [{"extra": extra} for extra in ("", *extras)]
            if need.marker is None or any(need.marker.evaluate(each) for each in given):
                todo.append((need, set(need.extras)))
    assert missing == []
    assert len(seen) > 40


def _arguments() -> list[str]:
    return [rest for stage in stages()[1].values() for word, rest in stage.steps if word == "ARG"]


def test_continuous_integration_runs_programs_pinned_by_hash() -> None:
    """A tag may be moved; the hash of a commit or a file identifies its content."""
    used = [
        line.partition("uses:")[2].strip()
        for path in (ROOT / ".github" / "workflows").iterdir()
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert not [each for each in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v[\d.]+", each)]
    uv = (ROOT / "images" / "uv.txt").read_text()
    assert re.search(r"^uv==[\d.]+ \\\n    --hash=sha256:[0-9a-f]{64}", uv, re.MULTILINE)
    for installs in (DOCKERFILE, ROOT / "Makefile"):
        assert "--require-hashes" in installs.read_text()


def test_stripping_keeps_a_library_working(tmp_path: Path) -> None:
    """Strip symbols, which no run needs; a second call writes nothing, as that would fill another layer."""
    original = Path(_rust.__file__)
    copy = tmp_path / original.name
    shutil.copy(original, copy)
    slim.without_symbols(copy)
    assert original.stat().st_size - copy.stat().st_size > slim.WORTH
    written = copy.stat().st_mtime_ns
    slim.without_symbols(copy)
    assert copy.stat().st_mtime_ns == written
    ask = "from importlib.machinery import ExtensionFileLoader as L; from importlib.util import *; import sys"
    ask += "; l = L('_rust', sys.argv[1]); m = module_from_spec(spec_from_loader('_rust', l)); l.exec_module(m)"
    ask += "; print(m.openssl.openssl_version_text())"
    output = [subprocess.check_output([sys.executable, "-c", ask, path], timeout=60) for path in (original, copy)]
    assert output[0] == output[1] != b""


def test_only_libraries_are_stripped(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(2**19), b"#!/bin/sh\n" * 2**16):
        path = tmp_path / "library.so"
        path.write_bytes(content)
        slim.without_symbols(path)
        assert path.read_bytes() == content


def test_slim_removes_only_unused_files(tmp_path: Path) -> None:
    gone = ["torch/include/a.h", "torch/bin/test_jit", "torch/share/x", "numpy/linalg/tests/test_a.py", "numpy/a.pyi"]
    stay = ["torch/bin/torch_shm_manager", "torch/testing/_internal/logging_tensor.py", "numpy/testing/__init__.py"]
    for name in (*gone, *stay):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    slim.removed(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(stay)
