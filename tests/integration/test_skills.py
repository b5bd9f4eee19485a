"""The skills of .agents/skills, followed on scripts in the shape of public examples: converted, checked, trained."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SKILLS = ROOT / ".agents" / "skills"
SCRIPTS = ROOT / "tests" / "skills"
FOUR = ["flower-app", "lightning-module", "nvflare-job", "trainer-script"]

LIGHTNING = """
from torch import nn

class LightningModule(nn.Module):
    def save_hyperparameters(self, **_):
        pass

    def log(self, *_, **__):
        pass

    def training_step(self, *_):
        pass

class Trainer: ...
class LightningDataModule: ...
"""
"""Names of the package `lightning` that the scripts import, where it is not installed."""


def arrays(load: str, count: int | None = None) -> Callable[[Path, Path], None]:
    """Return a function that writes a data set of scikit-learn to data.npz."""

    def write(_: Path, folder: Path) -> None:
        datasets = pytest.importorskip("sklearn.datasets")
        x, y = getattr(datasets, load)(return_X_y=True)
        np.savez(folder / "data.npz", x=x[:count].astype(np.float32), y=y[:count])

    return write


def cells(given: Path, _: Path) -> None:
    """Write the table that two scripts read."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 4)).round(3)
    size = (x @ [1, -1, 0.5, 0] + 10).round(2)
    table = given / "cells.csv"
    if "kind" in (given / "script.py").read_text():
        rows = [f"{','.join(map(str, row))},{int(s > 10)}" for row, s in zip(x, size, strict=True)]
        table.write_text("\n".join(["a,b,c,d,kind", *rows]))
    else:
        rows = [f"{','.join(map(str, row))},{s}" for row, s in zip(x, size, strict=True)]
        table.write_text("\n".join(["a,b,c,d,size", *rows]))


def windows(_: Path, folder: Path) -> None:
    """Write windows of token ids, in which each token follows from the one before it."""
    start = np.random.default_rng(0).integers(0, 30, 120)
    x = (start[:, None] + 7 * np.arange(16)) % 30
    np.savez(folder / "data.npz", x=x, y=x)


def reviews(_: Path, folder: Path) -> None:
    """Write reviews, and a tokenizer of their words."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "good", "bad", *(f"word{i}" for i in range(30))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "tokenizer")
    random = np.random.default_rng(0)
    lines = []
    for i in range(160):
        text = [f"word{each}" for each in random.integers(0, 30, 5)]
        text.insert(random.integers(5), ("bad", "good")[i % 2])
        lines.append(f"{' '.join(text)},{('no', 'yes')[i % 2]}")
    (folder / "reviews.csv").write_text("\n".join(["review,liked", *lines]))


TEXT = (
    "data={dataset: table, source: {path: reviews.csv, label: liked, text: {column: review, tokenizer: tokenizer, "
    "length: 12}}, partition: {scheme: iid, clients: 10}, held_out_fraction: 0.2}"
)
SMALL = ("data.partition.train_per_client=60", "data.partition.test_per_client=40")


@dataclass(frozen=True)
class Case:
    """A script of a skill; the values that its list leaves to set; and its data."""

    skill: str
    script: str
    sets: tuple[str, ...] = ()
    data: Callable[[Path, Path], None] | None = None
    clients: int = 10


CASES = [
    Case(
        "flower-app",
        "flower_images/client_app.py",
        (*SMALL, "algorithm.local.batch_size=16", "algorithm.local.lr=0.05", "algorithm.local.epochs=1"),
    ),
    Case("flower-app", "flower_table.py", data=arrays("load_breast_cancer")),
    Case(
        "flower-app",
        "flower_hyperparameters.py",
        (
            "data.partition={scheme: dirichlet, clients: 5, alpha: 0.3, train_per_client: 60, test_per_client: 40}",
            "federation.clients_per_round=5",
            "algorithm.local.schedule={name: step, every: 1}",
        ),
        clients=5,
    ),
    Case("nvflare-job", "nvflare_images/client.py", SMALL),
    Case("nvflare-job", "nvflare_table.py", data=cells),
    Case("nvflare-job", "nvflare_lightning/client.py", SMALL),
    Case("lightning-module", "lightning_images.py", SMALL, clients=8),
    Case("lightning-module", "lightning_digits.py", data=arrays("load_digits", 600), clients=8),
    Case("lightning-module", "lightning_regression.py", data=cells, clients=8),
    Case("trainer-script", "trainer_text.py", (TEXT,), data=reviews, clients=8),
    Case("trainer-script", "trainer_images.py", SMALL, clients=8),
    Case("trainer-script", "trainer_tokens.py", ("algorithm.local.lr=0.01",), data=windows, clients=8),
]


def steps(skill: str) -> list[str]:
    """Return the lines of a skill's commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (SKILLS / skill / "SKILL.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return blocks[0].splitlines()


def lightning_somewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `lightning` importable."""
    for name in ("lightning", "lightning/pytorch", "pytorch_lightning"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(LIGHTNING)
        monkeypatch.delitem(sys.modules, name.replace("/", "."), raising=False)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script.removesuffix(".py"))
def test_a_script_is_converted_and_trains(
    case: Case,
    tmp_path: Path,
    fedloom: Callable[..., tuple[int, str, str]],
    fresh_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Follow the commands of the skill, with the script in place of its name and the values that were left to set."""
    monkeypatch.setenv("FEDLOOM_DATA", str(fresh_root))
    lightning_somewhere(tmp_path / "packages", monkeypatch)
    source, given = SCRIPTS / case.script, tmp_path / "given"
    if source.parent == SCRIPTS:
        given.mkdir()
        shutil.copy(source, given / "script.py")
        script = given / "script.py"
    else:
        shutil.copytree(source.parent, given)
        script = given / source.name
    if case.data is cells:
        case.data(given, given)
    sets = [word for value in case.sets for word in ("--set", value)]
    monkeypatch.delitem(sys.modules, "network", raising=False)
    listed = ""
    for line in steps(case.skill):
        command, *words = shlex.split(line)
        if command == "cd":
            monkeypatch.chdir(words[0])
            if case.data is not None and case.data is not cells:
                case.data(given, Path.cwd())
        elif command == "export":
            assert words == ["PYTHONPATH=."]
            monkeypatch.syspath_prepend(str(Path.cwd()))
        else:
            words = [str(script) if word.endswith(".py") else word for word in words]
            code, out, err = fedloom(*words, *(sets if words[0] in ("check", "run") else ()))
            assert code == 0, f"{line}\n{out}{err}"
            listed = listed or out
    summary = json.loads(Path("trial", "summary.json").read_text())
    assert (summary["algorithm"], summary["rounds"]) == ("fedavg", 2)
    assert summary["seen"]["clients"] == case.clients
    measured = [json.loads(each) for each in Path("trial", "metrics.jsonl").read_text().splitlines()]
    assert [each["round"] for each in measured] == [0, 2]
    assert measured[1]["global"]["loss_mean"] < measured[0]["global"]["loss_mean"]
    for value in case.sets:  # what was set was in the list; other keys make the run short
        key = value.split("=")[0]
        if key not in {each.split("=")[0] for each in SMALL} and key != "federation.clients_per_round":
            assert key in listed or key.split(".")[0] in listed, key
    monkeypatch.delitem(sys.modules, "network", raising=False)


def test_each_skill_has_three_scripts_and_each_script_a_skill() -> None:
    assert sorted(path.parent.name for path in SKILLS.glob("*/SKILL.md")) == FOUR
    assert [sum(case.skill == name for case in CASES) for name in FOUR] == [3, 3, 3, 3]
    files = {path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.rglob("*.py") if "__pycache__" not in path.parts}
    beside = {"flower_images/task.py", "nvflare_images/model.py", "nvflare_lightning/model.py"}
    assert files - beside == {case.script for case in CASES}


@pytest.mark.parametrize("name", FOUR)
def test_a_skill_describes_itself_and_names_what_exists(name: str) -> None:
    text = (SKILLS / name / "SKILL.md").read_text(encoding="utf-8")
    _, head, body = text.split("---\n", 2)
    front: dict[str, Any] = yaml.safe_load(head)
    assert front.keys() == {"name", "description"}
    assert front["name"] == name
    assert 50 < len(front["description"]) < 1024
    assert f".agents/skills/{name}/SKILL.md" in (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    pages = [ROOT / "docs" / "experiment-keys.md", *(ROOT / "docs" / "keys").rglob("*.md")]
    keys = "".join(page.read_text(encoding="utf-8") for page in pages)
    for key in re.findall(r"`((?:algorithm|data|federation|model|task)\.(?!npz|py)[\w.]+)`", body):
        assert f"`{key.split('.')[-1]}`" in keys or f".{key.split('.')[-1]}`" in keys, key
    for link in re.findall(r"\]\(([^)#\s]+)", body):
        assert (SKILLS / name / link).exists(), link
