"""Write the pages of the command line and of the Python API from the code (``make docs``)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

import fedloom
from fedloom.cli.main import app

CLI_PAGE = Path(__file__).parent / "cli.md"
API_PAGE = Path(__file__).parent / "api.md"

CLI_HEAD = """\
# Command line

Look up the commands and their options. `fedloom COMMAND --help` shows the same texts.
[troubleshooting.md](troubleshooting.md#exit-codes) explains the exit codes. A path that begins with `~` starts from
the home folder, also in `--out=~/run`, which a shell leaves as it is. This page is generated from the code by
`make docs`.
"""

API_HEAD = """\
# Python API

Look up the functions and classes of the package `fedloom`; [the guide](python.md) shows how to use them.
This page is generated from the docstrings by `make docs`.
"""

HEADINGS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Examples", "Notes", "Warns")
"""Sections of a NumPy docstring that a page shows."""


def cli_page() -> str:
    """Return the page: a section for each command, with a table of its arguments and options."""
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    parts = [CLI_HEAD, *_table([p for p in root.params if p.name != "help"], "Before any command:"), ""]
    for path, command in _commands(root, ("fedloom",)):
        if hasattr(command, "commands"):
            above = f"Before any command of the group, as in `{' '.join(path)} --{command.params[0].name} ... COMMAND`:"
            table = _table([p for p in command.params if p.name != "help"], above)
            parts += [f"## `{' '.join(path)}`", "", command.help or "", "", *table, ""]
            continue
        arguments = [_metavar(p) for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        usage = " ".join([*path, *arguments, *(["[OPTIONS]"] if options else [])])
        about = inspect.cleandoc(command.help or "").replace("\f", "")
        parts += [f"## `{' '.join(path)}`", "", about, "", f"```sh\n{usage}\n```", "", *_table(command.params), ""]
    return "\n".join(parts).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if not hasattr(command, "commands") or any(p.name != "help" for p in command.params):
            yield (*path, name), command
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))


def _table(params: list[Any], above: str = "") -> list[str]:
    rows = []
    for param in (each for each in params if not getattr(each, "hidden", False)):
        is_flag = getattr(param, "is_flag", False)
        name = _metavar(param) if param.param_type_name == "argument" else ", ".join(param.opts + param.secondary_opts)
        shown = name if is_flag or param.param_type_name == "argument" else f"{name} {_metavar(param)}"
        if param.required:
            default = "required"
        elif is_flag or param.default in (None, "", ()):
            default = ""
        else:
            default = f"`{param.show_default if isinstance(param.show_default, str) else param.default}`"
        notes = [param.help or ""]
        if param.envvar:
            notes.append(f"Environment: `{param.envvar}`.")
        cells = (f"`{shown}`", default, " ".join(filter(None, notes)))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |")
    return [*([above, ""] if above else []), "| option | default | meaning |", "|---|---|---|", *rows] if rows else []


def _metavar(param: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    kind = param.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if param.param_type_name == "argument":
        return str(param.name).upper() if param.required else f"[{str(param.name).upper()}]"
    kinds = get_args(kind) or (kind,)
    return {str: "TEXT", int: "N", float: "NUMBER"}.get(kinds[0], kinds[0].__name__.upper())


def api_page() -> str:
    """Return the page: a section for each public name of the package, and for each public method of a class."""
    names = getattr(fedloom, "__all__", None) or [
        name for name, value in vars(fedloom).items() if inspect.isfunction(value) and not name.startswith("_")
    ]
    parts = [API_HEAD]
    for name in names:
        value = getattr(fedloom, name)
        parts += _entry(f"fedloom.{name}", value, "##")
        if inspect.isclass(value) and not hasattr(value, "model_fields"):
            for below, method in vars(value).items():
                target = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if not below.startswith("_") and inspect.isfunction(target):
                    parts += _entry(f"{name}.{below}", target, "###", is_property=isinstance(method, property))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(title: str, value: Any, heading: str, *, is_property: bool = False) -> list[str]:
    parts = [f"{heading} `{title}`", ""]
    if callable(value) and not is_property:
        parts += ["```python", _signature(title, value), "```", ""]
    return [*parts, docstring(inspect.getdoc(value) or ""), ""]


def _signature(title: str, value: Any) -> str:
    if fields := getattr(value, "model_fields", None):  # their types and checks are in the pages of keys
        return f"{title}({', '.join(name if one.is_required() else f'{name}=...' for name, one in fields.items())})"
    try:
        signature = inspect.signature(value)
    except ValueError:
        return title
    kept = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    shown = str(signature.replace(parameters=kept)).replace("'", "")
    prefix = "await " if inspect.iscoroutinefunction(value) else ""
    return f"{prefix}{title}{shown}"


def docstring(text: str) -> str:
    """Return a NumPy docstring as Markdown: its sections in bold, what they list as a list."""
    lines = text.splitlines()
    sections: list[tuple[str, list[str]]] = [("", [])]
    for i, line in enumerate(lines):
        if set(line) == {"-"} and lines[i - 1] in HEADINGS:
            sections[-1][1].pop()
            sections.append((lines[i - 1], []))
        else:
            sections[-1][1].append(line)
    parts = []
    for title, body in sections:
        said = "\n".join(body).strip()
        if title in ("", "Notes"):
            parts.append(_words(said))
        elif title == "Examples":
            code = inspect.cleandoc("\n".join(line for line in body if line.strip() != "::").strip("\n"))
            parts += [f"**{title}**", f"```python\n{code}\n```"]
        else:
            parts += [f"**{title}**", "\n".join(_items(body))]
    return "\n\n".join(part for part in parts if part)


def _items(body: list[str]) -> Iterator[str]:
    """Items of a section: a name without indentation, and what is said of it, indented."""
    name, said = "", list[str]()
    for line in [*body, "end"]:
        if line[:1].strip():
            if name:
                yield f"- `{name}`: {_words(' '.join(said))}".rstrip(": ")
            name, said = line.strip(), []
        elif line.strip():
            said.append(line.strip())


def _words(text: str) -> str:
    """Markdown's code in place of reStructuredText's."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    API_PAGE.write_text(api_page(), encoding="utf-8")
