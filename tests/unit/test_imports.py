"""Imports allowed between packages (docs/design.md, section 2), read from the source code."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

import fedloom
from fedloom.tasks.names import TaskName

SOURCE = Path(__file__).parents[2] / "src" / "fedloom"

COMMON = {"core", "errors", "tasks"}
"""Rooms that every room may know."""

PARTS = {
    "messages", "models", "data", "storage", "algorithms", "evaluation", "federation", "security", "transport",
    "experiment", "runs",
}  # fmt: skip

CAPABILITIES = {"audits", "ledger", "member", "reporting", "serving", "tuning"}
"""Optional rooms that Python users and the command line reach."""

ARROWS: dict[str, set[str]] = {
    "core": set(),
    "errors": set(),
    "tasks": set(),
    "messages": set(),
    "models": set(),
    "storage": set(),
    "data": {"storage"},
    "privacy": set(),
    "algorithms": {"messages", "models", "data", "privacy"},
    "experiment": {"models", "storage", "data", "privacy", "algorithms"},  # they never import experiment
    "evaluation": {"messages", "data"},
    "attacks": {"messages", "models", "storage", "data", "privacy", "algorithms", "evaluation"},
    "runs": {"storage", "data", "experiment"},
    "federation": {*PARTS, "privacy"} - {"federation", "transport"},
    "sums": {"messages", "storage", "data", "privacy", "algorithms", "runs", "federation", "security"},
    "security": {"storage", "data", "experiment"},
    "transport": PARTS - {"transport", "experiment"},
    "reporting": {"models", "data", "experiment", "evaluation", "runs", "federation", "engine"},
    "engine": {*PARTS, "privacy"},
    "ledger": {*PARTS, "privacy", "engine"},
    "member": {
        "data",
        "messages",
        "models",
        "algorithms",
        "evaluation",
        "experiment",
        "federation",
        "privacy",
        "engine",
        "ledger",
    },
    "serving": {*PARTS, "privacy", "engine", "ledger"},
    "tuning": {"models", "storage", "experiment", "runs", "engine"},
    "audits": {*PARTS, "privacy", "attacks", "sums", "reporting", "engine"},
    "trackers": {"experiment", "runs", "engine"},
    "api": {*CAPABILITIES, "models", "storage", "data", "experiment", "runs", "engine"},
    "cluster": PARTS,
    "ui": {"algorithms", "engine", "federation", "reporting", "runs", "security"},
    "kubeflow": {
        "storage", "data", "experiment", "runs", "reporting", "engine", "serving", "cluster",
    },
    "cli": {*PARTS, *CAPABILITIES, "privacy", "engine", "api", "cluster", "kubeflow", "ui"},
    "templates": {"algorithms"},  # folders that users begin with
    "__main__": {"cli"},
    "__init__": {"experiment", "serving", "api"},  # on first access to its names
}  # fmt: skip
"""Room -> rooms it may import. There is no way back: see :func:`test_imports_have_no_cycles`."""

FOR_TYPES_ONLY = {("evaluation", "models")}
"""Arrows that may exist under ``if TYPE_CHECKING:`` alone."""

UNKNOWN_TO_ALGORITHMS = {
    "grpc", "kubernetes", "kfp", "minio", "yaml", "typer", "rich", "pathlib", "os", "io", "shutil", "tempfile",
    "socket", "subprocess", "asyncio", "threading", "time",
}  # fmt: skip
"""No network, files, clocks or user interface in an algorithm."""

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib"}


@dataclass(frozen=True)
class Import:
    """One imported module, and whether it is imported only for the type checker."""

    module: str
    line: int
    typing_only: bool


def imports(tree: ast.AST, package: str, typing_only: bool = False) -> Iterator[Import]:
    """Yield every import below a node; relative ones are resolved against ``package``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (above, node.module or "") if part)
            for alias in node.names:  # a name may be a module, as in `from fedloom import experiment`
                yield Import(f"{module}.{alias.name}", node.lineno, typing_only)
        elif isinstance(node, ast.If) and any("TYPE_CHECKING" in vars(part).values() for part in ast.walk(node.test)):
            yield from imports(ast.Module(body=node.body, type_ignores=[]), package, typing_only=True)
            yield from imports(ast.Module(body=node.orelse, type_ignores=[]), package, typing_only)
        else:
            yield from imports(node, package, typing_only)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def violations(source: Path) -> list[str]:
    """Return everything in a source tree of the package ``fedloom`` that the design does not allow."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        room = "cli" if relative.name == "commands.py" else relative.parts[0].removesuffix(".py")
        module = ("fedloom", *relative.with_suffix("").parts)
        package = ".".join(module[:-1])
        tree = parsed(path)
        for item in imports(tree, package):
            if reason := refused(room, item):
                found.append(f"{relative}:{item.line}: {room} {reason}")
        if room != "tasks":
            found += [f"{relative}:{line}: decides by the task {name}" for line, name in task_decisions(tree)]
        if "wire" not in relative.parts:
            found += [f"{relative}:{line}: {name} pickles" for line, name in pickling(tree)]
    return found


def refused(room: str, item: Import) -> str | None:
    """Return the reason why a package may not have this import, or None."""
    top, *rest = item.module.split(".")
    if top in PICKLES:
        return f"imports {top}, which pickles"
    if top != "fedloom":
        return f"imports {top}" if room == "algorithms" and top in UNKNOWN_TO_ALGORITHMS else None
    if not rest:
        return None  # the package itself: its version
    other = rest[0]
    if room == "transport" and other == "algorithms" and rest[1:2] != ["base"]:
        return f"imports {item.module}, a method"
    if rest[1:2] == ["commands"] and room != "cli":
        return f"imports {item.module}, which belongs to the command line"
    if other in {room, *COMMON, "__version__"}:
        return None
    if room not in ARROWS:
        return f"is a room this test does not know, and imports fedloom.{other}"
    if other in ARROWS[room] or (item.typing_only and (room, other) in FOR_TYPES_ONLY):
        return None
    return f"imports fedloom.{other}"


def pickling(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return uses of ``torch.load``, ``torch.save``, and of numpy's pickling."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in ("load", "save"):
                    yield node.lineno, f"torch.{alias.name}"
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save") and ast.unparse(node.value) == "torch":
            yield node.lineno, f"torch.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allow_pickle"


def task_decisions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield comparisons with names of tasks, choices by them in mappings, and cases; declarations may list them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [each for side in sides for each in getattr(side, "elts", [side])]
        elif isinstance(node, ast.Dict):
            parts = [each for each in node.keys if each is not None]
        elif isinstance(node, ast.Subscript):
            parts = [] if isinstance(node.value, ast.Name) and node.value.id == "Literal" else [node.slice]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        else:
            continue
        for each in parts:
            if isinstance(each, ast.Constant) and each.value in get_args(TaskName):
                yield each.lineno, str(each.value)


def test_packages_import_only_allowed_packages() -> None:
    assert violations(SOURCE) == []


def test_every_package_is_known_to_this_test_and_hides_no_name_of_the_python_interface() -> None:
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert rooms == set(ARROWS)
    assert not rooms & set(fedloom.__all__)  # importing ``fedloom.x.y`` makes ``fedloom.x`` the package


def test_no_package_imports_more_than_twelve_others() -> None:
    """The command line, which has all commands, apart."""
    known: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        relative = path.relative_to(SOURCE)
        if len(relative.parts) > 1 and relative.name != "commands.py" and relative.parts[0] != "cli":
            package = ".".join(("fedloom", *relative.parts[:-1]))
            for item in imports(parsed(path), package):
                top, room, *_ = (*item.module.split("."), "")
                if top == "fedloom" and (SOURCE / room).is_dir() and room:
                    known.setdefault(relative.parts[0], set()).add(room)
    assert {room: others for room, others in known.items() if len(others - {room}) > 12} == {}


def test_imports_have_no_cycles() -> None:
    known = {room: {*others, *(b for a, b in FOR_TYPES_ONLY if a == room)} for room, others in ARROWS.items()}
    assert set(TopologicalSorter(known).static_order()) == set(ARROWS)  # raises CycleError


def test_a_public_name_is_defined_once() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if "_pb2" not in path.name and "templates" not in path.relative_to(SOURCE).parts:
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("where", "code", "expected"),
    [
        ("models/a.py", "from fedloom.algorithms import base", "models imports fedloom.algorithms"),
        ("models/a.py", "from fedloom import experiment", "models imports fedloom.experiment"),
        ("data/a.py", "def f():\n    import fedloom.experiment", "data imports fedloom.experiment"),
        ("data/a.py", "from ..messages import Message", "data imports fedloom.messages"),
        ("storage/a.py", "import fedloom.data", "storage imports fedloom.data"),
        ("algorithms/a.py", "import grpc", "algorithms imports grpc"),
        ("algorithms/a.py", "from pathlib import Path", "algorithms imports pathlib"),
        ("algorithms/a.py", "try:\n    import yaml\nexcept ImportError: ...", "algorithms imports yaml"),
        ("algorithms/a.py", "from fedloom.federation.transport import Call", "algorithms imports fedloom.federation"),
        ("transport/a.py", "from fedloom.algorithms.pefll import PEFLL", "transport imports fedloom.algorithms.pefll"),
        ("transport/a.py", "from fedloom.algorithms import fedavg", "transport imports fedloom.algorithms.fedavg"),
        ("evaluation/a.py", "from fedloom.models.predictors import Predictor", "evaluation imports fedloom.models"),
        ("federation/a.py", "import fedloom.transport.codec", "federation imports fedloom.transport"),
        ("engine/a.py", "from fedloom.cli import watch", "engine imports fedloom.cli"),
        ("kubeflow/a.py", "def f():\n    from fedloom.cli.main import main", "kubeflow imports fedloom.cli"),
        ("cluster/a.py", "from fedloom.engine import assemble", "cluster imports fedloom.engine"),
        ("audits/a.py", "from fedloom.reporting.commands import f", "audits imports fedloom.reporting.commands.f"),
        ("new/a.py", "from fedloom.data import federated", "new is a room this test does not know"),
        ("data/a.py", "if spec.task == 'regression': ...", "decides by the task regression"),
        ("data/a.py", "x = task not in (None, 'segmentation')", "decides by the task segmentation"),
        ("models/a.py", "x = {'multilabel': 1}[task.name]", "decides by the task multilabel"),
        ("models/a.py", "match task.name:\n    case 'next_token': ...", "decides by the task next_token"),
        ("cli/a.py", "import pickle", "cli imports pickle, which pickles"),
        ("data/a.py", "import torch\ntorch.load('x')", "torch.load pickles"),
        ("data/a.py", "from torch import save", "torch.save pickles"),
        ("data/a.py", "numpy.load('x', allow_pickle=True)", "allow_pickle pickles"),
    ],
)  # fmt: skip
def test_a_forbidden_import_is_detected(tmp_path: Path, where: str, code: str, expected: str) -> None:
    path = tmp_path / where
    path.parent.mkdir()
    path.write_text(code)
    (found,) = violations(tmp_path)
    assert found.partition(": ")[2].startswith(expected)


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("evaluation/a.py", "if TYPE_CHECKING:\n    from fedloom.models.predictors import Predictor"),
        ("algorithms/a.py", "import torch\nfrom fedloom.models.flat import FlatModel\nfrom .base import Settings"),
        ("transport/a.py", "import grpc\nimport fedloom.federation.transport\nimport fedloom.errors"),
        ("cli/a.py", "import fedloom\nfrom fedloom.transport import codec"),
        ("models/a.py", "tasks = ('classification', 'regression')\ntask = Literal['regression']"),
        ("data/a.py", "numpy.load('x', allow_pickle=False)"),
    ],
)  # fmt: skip
def test_an_allowed_import_passes(tmp_path: Path, where: str, code: str) -> None:
    path = tmp_path / where
    path.parent.mkdir()
    path.write_text(code)
    assert violations(tmp_path) == []


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running code."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_line_starts_without_heavy_imports() -> None:
    lists = "from fedloom.cli.main import app\napp(['--help'], standalone_mode=False)"  # imports every command
    assert not {"torch", "numpy", "grpc", "pydantic", "yaml", "rich", "matplotlib"} & loaded_by(lists)


def test_unreadable_files_and_missing_runs_are_rejected_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [")
    files = [str(tmp_path / name) for name in ("broken.yaml", "missing.yaml")]
    calls = [([command, file], 2) for command in ("run", "aggregator", "partition") for file in files]
    missing = [(["evaluate", "nowhere"], 3), (["personalize", "nowhere", "--out", "models"], 3)]
    for ended, heavy in ((calls, {"torch", "numpy", "grpc"}), (missing, {"torch", "grpc", "matplotlib"})):
        code = f"""
import sys
from fedloom.cli.main import main
for arguments, code in {ended}:
    sys.argv = ["fedloom", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code == code
"""
        assert not heavy & loaded_by(code)


def test_a_command_that_exports_a_model_ends_without_reports_of_leaks() -> None:
    pytest.importorskip("triton")
    imports = "import sys, triton.compiler.compiler\nfrom fedloom.cli.main import main"
    code = [sys.executable, "-c", f"{imports}\nsys.argv = ['fedloom', '--version']\nmain()"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert (done.stderr, bool(done.stdout)) == ("", True)


@pytest.mark.slow
def test_a_worker_imports_neither_kubeflow_nor_reporting() -> None:
    worker = (
        "import fedloom.cli.main, fedloom.experiment, fedloom.federation, fedloom.transport, fedloom.engine.worker\n"
        + "\n".join(
            f"import fedloom.transport.{path.stem}"
            for path in (SOURCE / "transport").glob("*.py")
            if path.stem != "__init__"
        )
    )
    assert not {"kfp", "kubernetes", "matplotlib", "jinja2", "minio", "torchvision"} & loaded_by(worker)


def test_the_python_of_windows_is_refused_with_advice() -> None:
    code = "import sys; sys.platform = 'win32'; import fedloom"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "WSL" in done.stderr
