"""Lists of choices for an experiment file, and the help of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from run_processes import fedloom

from fedloom.algorithms.base import available, find_algorithm
from fedloom.cli.main import COMMANDS, HEADINGS
from fedloom.core.plugins import entries
from fedloom.experiment import json_schema
from fedloom.tasks.registry import TASKS
from fedloom.transport.versions import PROTOCOL


def listed(what: str) -> dict[str, dict[str, object]]:
    found = {entry["name"]: entry for entry in json.loads(fedloom(what, "--json"))}
    table = fedloom(what, environment={"COLUMNS": "300"})
    assert all(re.search(rf"^{re.escape(name)}\b", table, re.M) for name in found)
    return found


def test_every_method_is_listed_with_its_protections() -> None:
    found = listed("methods")
    assert sorted(found) == sorted(available())
    for name, entry in found.items():
        method = find_algorithm(name)
        settings = method.settings()
        without = entry["without"]
        assert isinstance(without, dict)
        assert ("secure sums" in without) == (method.sums_suffice(settings) is not None)
        assert ("privacy of examples" in without) == (method.example_privacy(settings) is not None)
        assert ("privacy of clients" in without) >= ("secure sums" in without)  # noise is added to a sum
        assert re.fullmatch(r"\d{4}\.\d{4,5}", str(entry["arxiv"])), name


def schema_names(key: str, name: str) -> set[str]:
    """Return the values of a discriminator by the JSON schema of experiment files."""
    schema = json_schema()
    return {
        definition["properties"][name]["const"]
        for title, definition in schema["$defs"].items()
        if title.endswith(key) and "const" in definition.get("properties", {}).get(name, {})
    }


def test_models_schemes_and_tasks_are_those_of_the_schema() -> None:
    assert set(listed("models")) >= {"lenet", "module", "unet"}
    assert set(listed("schemes")) == schema_names("Scheme", "scheme")
    assert set(listed("tasks")) == {task.name for task in TASKS}
    assert listed("models")["mlp"]["inputs"] == ["pixels", "features"]


def test_help_groups_commands_and_cuts_no_sentence() -> None:
    text = fedloom("--help")
    headings = [line for line in text.splitlines() if re.fullmatch(r"[A-Z][a-z' ]+:", line)]
    assert {f"{heading}:" for heading in COMMANDS} <= set(headings)
    assert "Other commands:" not in headings
    assert text.count("...") == text.count("[ARGS]...")
    for section in re.split(r"\n(?=[A-Z][a-z' ]+:\n)", text)[2:]:
        names = re.findall(r"^  ([a-z]+)  ", section, re.M)
        assert names == sorted(names)
    assert {point.name for point in entries("fedloom.commands")} <= set(HEADINGS)


def test_a_shell_completes_commands() -> None:
    words = {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": "fedloom me", "COMP_CWORD": "1"}
    command = [Path(sys.executable).with_name("fedloom")]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["member", "methods"]


def test_the_version_names_the_protocol() -> None:
    assert f"protocol {PROTOCOL}" in fedloom("--version")
