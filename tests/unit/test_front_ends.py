"""Errors are data: front ends name arguments in their form, processes exchange errors, notebooks show them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from facts import tells

import fedloom
from fedloom import errors
from fedloom.cluster.api import Unreachable
from fedloom.core.digests import RESTORE
from fedloom.core.processes import TELL_PARENT, ChildReport, listen_to_parent, tell_failure, tell_notice
from fedloom.errors import (
    FAILURES,
    DataError,
    ExperimentError,
    FedloomError,
    WorkerLostError,
    argument,
    arguments_as_options,
    from_json,
    spelled,
)
from fedloom.runs.listing import RESUME

SOURCE = Path(errors.__file__).parent


def made() -> FedloomError:
    text = f"{argument('class_counts')} needs {argument('packed')}"
    return ExperimentError(
        text, hint=f"go on with {argument('resume')}: `fedloom run --out DIR`", key="class_counts", found=3
    )


def test_errors_name_arguments_in_python_and_options_on_the_command_line() -> None:
    assert str(made()) == "class_counts needs packed\n  go on with resume=True: `fedloom run --out DIR`"
    with arguments_as_options():
        error = made()
        assert spelled(f"with {argument('timeout_s')}") == "with --set timeout_s"
    assert str(error) == "--set class_counts needs --data\n  go on with --resume: `fedloom run --out DIR`"
    assert spelled(f"with {argument('timeout_s')}") == "with timeout_s"


@pytest.mark.parametrize("text", [errors.NEW_RUN, errors.GO_ON, RESTORE, RESUME])
def test_hints_about_runs_have_a_python_form(text: str) -> None:
    assert "--" not in spelled(text)
    with arguments_as_options():
        assert "--" in spelled(text)


@pytest.mark.parametrize("kind", FAILURES.values())
def test_an_error_reaches_another_process_unchanged(kind: type[FedloomError]) -> None:
    error = kind("a\nerror: b {c}", hint="d\n  e", key="f.g", found=float("inf"), allowed=["h", 2, Path("i")])
    back = from_json(json.loads(json.dumps(error.as_json())))
    assert type(back) is kind
    assert (str(back), back.hint, back.key, back.found) == (str(error), "d\n  e", "f.g", float("inf"))
    assert back.allowed == ["h", 2, "i"]
    with arguments_as_options():  # the front end of the process that shows the error decides
        assert str(from_json(made().as_json())).startswith("--set class_counts needs --data")


def test_a_parent_reads_the_report_of_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "told.jsonl"
    assert (ChildReport(file).failure, ChildReport(file).notices) == (None, [])
    monkeypatch.setenv(TELL_PARENT, str(file))
    listen_to_parent()
    monkeypatch.delenv(TELL_PARENT, raising=False)
    tell_notice("one\nline")
    tell_failure(made().within("worker-0"))
    tell_failure(ValueError("a bug"))
    listen_to_parent()  # without a parent
    tell_notice("two")
    with file.open("a") as written:
        written.write('{"notice": "cut in the mid')
    reported = ChildReport(file)
    assert reported.notices == ["one\nline"]
    assert isinstance(reported.failure, ExperimentError)
    assert str(reported.failure).startswith("worker-0: class_counts needs packed\n")
    assert reported.bug.endswith("ValueError: a bug\n")
    assert reported.ended(1) == f"failed because of a bug:\n{reported.bug.rstrip()}"
    assert tells(ChildReport(tmp_path / "none").ended(-9), "killed by signal 9", "memory")
    assert ChildReport(tmp_path / "none").ended(-11) == "was killed by signal 11"


def test_an_error_of_a_class_that_only_its_process_knows_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "reports.jsonl"
    file.write_text(json.dumps({"failure": Unreachable("no answer", hint="look").as_json()}) + "\n")
    found = ChildReport(file).failure
    assert isinstance(found, WorkerLostError)
    assert str(found) == "no answer\n  look"


def options_in_errors(path: Path) -> list[int]:
    """Return the lines below the command line that contain an option in a text that is not a command."""
    text = path.read_text(encoding="utf-8")
    if "--" not in text:
        return []
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            texts = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            for constant in texts:
                output = re.sub(r"`?(fedloom [a-z]|kubectl ).*", "", constant.value, flags=re.S)
                if id(constant) not in docs and re.search(r"(^|[^-\w])--[a-z]", output):
                    found.append(constant.lineno)
    return found


def test_only_the_command_line_spells_options() -> None:
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "cli"
        and path.name != "commands.py"
        and (lines := options_in_errors(path))
    }
    assert found == {}


def shown(act: object) -> list[str]:
    try:
        act()  # type: ignore[operator]
    except DataError as error:
        return error._render_traceback_()
    raise AssertionError("nothing was raised")


def test_a_notebook_shows_the_message_and_the_users_line(tmp_path):
    def look() -> None:
        fedloom.load(tmp_path / "nowhere")

    led, output = shown(look)
    assert led.endswith('in look: fedloom.load(tmp_path / "nowhere")')
    assert output.startswith("DataError: ")
    assert "nowhere" in output
    assert len(output.splitlines()) == 2  # with the hint


def test_an_error_that_was_not_raised_is_shown_alone():
    assert DataError("found nothing")._render_traceback_() == ["DataError: found nothing"]
