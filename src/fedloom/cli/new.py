"""``fedloom new``: folders that run as they lie, to begin with (the files are in ``fedloom/templates``)."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.results import CommandResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEMPLATES = Path(__file__).parents[1] / "templates"
"""Folder of the templates. The first line of each one's README.md says what it is."""
EXTRAS = re.compile(r"`fedloom\[([\w,]+)\]`")
"""FedLoom's extras that a template needs, in its README.md."""


@dataclass(frozen=True)
class Template:
    """A folder that can be written: its name, a sentence, its files, and the extras of FedLoom that it needs."""

    name: str
    summary: str
    files: tuple[str, ...]
    extras: tuple[str, ...] = ()


def templates() -> list[Template]:
    """Return the templates, sorted by name."""
    return [_template(readme.parent) for readme in sorted(TEMPLATES.glob("*/README.md"))]


def _named(incomplete: str) -> list[tuple[str, str]]:
    return [(each.name, each.summary) for each in templates() if each.name.startswith(incomplete)]


def _template(folder: Path) -> Template:
    """Return the template in a folder, without the bytecode that installers write into it."""
    readme = (folder / "README.md").read_text(encoding="utf-8")
    extras = EXTRAS.search(readme)
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts)
    summary = readme.partition("\n")[0].strip("# ")
    return Template(folder.name, summary, tuple(files), tuple(extras[1].split(",")) if extras else ())


def missing_extras(extras: Sequence[str]) -> list[str]:
    """Return the extras of FedLoom of which a package is not installed."""
    required = [(re.split(r"[^\w.-]", line)[0], line) for line in metadata.requires("fedloom") or ()]
    missing = []
    for extra in extras:
        names = [name for name, line in required if re.search(rf"extra == ['\"]{extra}['\"]", line)]
        if not all(any(metadata.distributions(name=name)) for name in names):
            missing.append(extra)
    return missing


def new_command(
    name: Annotated[
        str | None, typer.Argument(metavar="TEMPLATE", help="The template; none: list them.", autocompletion=_named)
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to write: a new one, or an empty one.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE.py", help="In place of TEMPLATE: a training script to make an experiment of."
        ),
    ] = None,
) -> CommandResult:
    """Write a folder to begin with, which runs as it is: an experiment, data, scripts and a README.md."""
    from fedloom.cli.tables import print_table
    from fedloom.core.words import pluralize
    from fedloom.errors import ExperimentError

    if script is not None:
        return _new_from_script(script, name, folder)
    known = templates()
    if name is None:

        def show() -> None:
            print_table("", ["template", "description"], [[each.name, each.summary] for each in known], texts=range(2))
            typer.echo("\nTo begin with one: fedloom new TEMPLATE DIR")

        return CommandResult(known, show)
    chosen = next((each for each in known if each.name == name), None)
    if chosen is None:
        names = [each.name for each in known]
        message = f"There is no template {name!r}; choose from {', '.join(names)}."
        raise ExperimentError(message, key="template", found=name, allowed=names)
    if folder is None:
        hint = f"fedloom new {name} {name}"
        raise ExperimentError("DIR is missing: give the folder to write.", key="dir", hint=hint)
    write_template(chosen, folder)
    text = f"{folder} has {pluralize(len(chosen.files), 'file')}: {', '.join(chosen.files)}\n"
    if missing := missing_extras(chosen.extras):
        text += f"It needs packages that are not installed: pip install 'fedloom[{','.join(missing)}]'\n"
    text += f"Next: read {folder / 'README.md'}; its commands run in {folder}."
    return CommandResult({"folder": folder.absolute(), **asdict(chosen)}, text)


def _new_from_script(script: Path, name: str | None, folder: Path | None) -> CommandResult:
    """Write an experiment that trains a script's module; return what was taken over and what is left to do."""
    from fedloom.cli.script import Conversion
    from fedloom.cli.tables import print_table
    from fedloom.errors import ExperimentError, argument

    if folder is not None:
        message = f"TEMPLATE and {argument('from')} cannot be combined (got {name!r}); give only DIR."
        raise ExperimentError(message, key="template", found=name)
    target = Path(name or script.stem)
    made = Conversion(script, target.absolute().name)
    files = made.files()
    write_folder(target, [(file, text.encode()) for file, text in files.items()])

    def show() -> None:
        print_table("", ["taken over", "script", "here"], made.taken, texts=range(3))
        print_table("\n", ["left to do", "script", "what"], made.left, texts=range(3))
        next_step = "Next: do what is left; README.md lists it, with the commands to run."
        typer.echo(f"\n{target} has {', '.join(files)}. {next_step}")

    facts = {"folder": target.absolute(), "files": [*files], "taken": made.taken, "left": made.left}
    return CommandResult(facts, show)


def write_template(template: Template, folder: Path) -> None:
    """Write a template's files into a new or empty folder; remove them again if one cannot be written.

    Raise ExperimentError if the folder is a file or has files, and StorageError if it cannot be written.
    """
    write_folder(folder, [(file, (TEMPLATES / template.name / file).read_bytes()) for file in template.files])


def write_folder(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write files into a new or empty folder, like :func:`write_template`."""
    from fedloom.core.files import storing
    from fedloom.errors import ExperimentError

    with storing(folder), ExitStack() as undo:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            what = "is not empty" if folder.is_dir() else "is a file"
            message = f"{folder} {what}; give a new or an empty folder. Nothing was changed."
            raise ExperimentError(message, key="dir", found=str(folder))
        for file, content in files:
            path = folder / file
            for missing in _missing(path.parents):
                missing.mkdir()
                undo.callback(missing.rmdir)
            with path.open("xb") as target:  # never overwrites, even what appears meanwhile
                undo.callback(path.unlink)
                target.write(content)
        undo.pop_all()


def _missing(parents: Iterable[Path]) -> list[Path]:
    """Return the folders that do not exist, the outermost first."""
    return [parent for parent in parents if not parent.exists()][::-1]
