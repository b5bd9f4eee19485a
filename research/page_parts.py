"""Parts of the results pages, one file a page in research/parts: the commands that make a page's tables again.

A page's file has ``parts``. Each names the tables of the page that its runs make (counted from 1), the minutes that it
took on one core of ``machine``, and ``runs``: the folder of each command below the page's folder of runs, with the
options of ``fedloom run`` (the experiment is ``file``), or a whole command. The folder is the run's name in the page's
compact file, where its published figures are. ``$name`` stands for an entry of ``texts``, for a value of ``each``,
whose lists are combined, or for ``$out``, the command's folder, and ``$runs``, the page's.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template

import yaml
from pydantic import BaseModel, ConfigDict, Field

from fedloom.errors import ExperimentError

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("parts")
NESTED = 5
"""Maximum depth of texts that contain other texts."""

FEDLOOM, PYTHON = "fedloom", "python"
"""First words of commands."""


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PartKeys(_Keys):
    """Keys of a part, and of a page for all of its parts."""

    about: str = ""
    tables: tuple[int, ...] = ()
    minutes: float | None = None
    data: tuple[str, ...] | None = None
    file: str | None = None
    folder: str | None = None
    options: str | None = None
    each: tuple[tuple[Mapping[str, str], ...], ...] = ()
    runs: Mapping[str, str] = {}
    commands: Mapping[str, str] = {}
    rows: tuple[str, ...] = ()
    compare: tuple[str, ...] | None = None
    tolerance: Mapping[str, Mapping[str, float]] = {}
    chooses: Mapping[str, Mapping[str, str]] = {}
    diverges: bool | None = None
    needs: str = ""


class PageKeys(_Keys):
    """Keys of a page's file; those of ``common`` hold for every part that does not have them.

    ``past`` are tables that no part makes, with the reason.
    """

    machine: str
    common: PartKeys = PartKeys()
    texts: Mapping[str, str] = {}
    parts: Mapping[str, PartKeys] = Field(min_length=1)
    past: Mapping[int, str] = {}


@dataclass(frozen=True)
class Step:
    """Command of a part, and the folder that it fills, relative to the page's folder of runs."""

    out: str
    words: tuple[str, ...]

    def shown(self) -> str:
        """Return the command as it is typed in a shell; patterns are not quoted."""
        return " ".join(word if "*" in word and " " not in word else shlex.quote(word) for word in self.words)


@dataclass(frozen=True)
class Part:
    """Part of a page: its name, its keys with the page's in place of missing ones, and the page's texts."""

    page: str
    name: str
    keys: PartKeys
    machine: str
    texts: Mapping[str, str]

    @property
    def title(self) -> str:
        """Return the name by which the command knows the part."""
        return f"{self.page}/{self.name}"

    @property
    def folder(self) -> str:
        """Return the name of the folder of runs, by default the page's."""
        return self.keys.folder or self.page

    def fetches(self) -> Iterator[Step]:
        """Yield the commands that fetch the part's data sets."""
        for name in self.keys.data or ():
            yield Step("", (FEDLOOM, "data", "fetch", name))

    def steps(self, runs: Path, seeds: Sequence[str] | None = None) -> Iterator[Step]:
        """Yield the commands in their order; with ``seeds``, only these seeds, and only commands that have one of them.

        Commands without ``--seeds`` are always there. Raise ExperimentError if no command has any of the seeds.
        """
        found = seeds is None
        for out, names, text, is_run in self._filled_in():
            here = {**names, "out": str(runs / out), "runs": str(runs)}
            words = shlex.split(self._filled(text, here))
            if is_run:
                words = [FEDLOOM, "run", self._filled(self.keys.file or "", names), "--out", here["out"], *words]
            if seeds is None or "--seeds" not in words:
                yield Step(out.strip("/"), tuple(words))
            elif kept := [seed for seed in seeds_of(words) if seed in seeds]:
                found = True
                words[words.index("--seeds") + 1] = ",".join(kept)
                yield Step(out.strip("/"), tuple(words))
        if not found:
            raise ExperimentError(f"{self.title} has none of the seeds {', '.join(seeds or ())}.", key="seeds")

    def rows(self) -> list[str]:
        """Return the patterns of the names that the part's runs have in the compact file."""
        if self.keys.rows:
            return list(dict.fromkeys(self._filled(row, names) for names in self._names() for row in self.keys.rows))
        outs = [out.strip("/") for out, *_ in self._filled_in()]
        return [pattern for out in outs for pattern in (out, f"{out}/*")]

    def _names(self) -> Iterator[dict[str, str]]:
        """Yield the texts with each combination of the values of ``each``."""
        for values in itertools.product(*self.keys.each):
            yield {**self.texts, **{key: text for each in values for key, text in each.items()}}

    def _filled_in(self) -> Iterator[tuple[str, dict[str, str], str, bool]]:
        """Yield folder, names, text and kind of each command: all combinations of one before the next."""
        done: set[str] = set()
        for where, text, is_run in self._templates():
            for names in self._names():
                out = self._filled(where, names)
                if out not in done:
                    done.add(out)
                    yield out, names, text, is_run

    def _templates(self) -> Iterator[tuple[str, str, bool]]:
        for where, text in self.keys.runs.items():
            yield where, f"{text} {self.keys.options or ''}", True
        for where, text in self.keys.commands.items():
            yield where, text, False

    def _filled(self, text: str, names: Mapping[str, str]) -> str:
        """Return a text with every ``$name`` replaced; raise ExperimentError for an unknown name."""
        try:
            for _ in range(NESTED):
                if "$" not in text:
                    break
                text = Template(text).substitute(names)
        except (KeyError, ValueError) as error:
            raise ExperimentError(f"{FOLDER / self.page}.yaml: {self.name} uses an unknown name: {error}") from error
        return text


def seeds_of(words: Sequence[str]) -> list[str]:
    """Return the seeds that a command names with ``--seeds``: ``2,5`` or ``1-3``."""
    text = words[words.index("--seeds") + 1]
    first, dash, last = text.partition("-")
    return [str(seed) for seed in range(int(first), int(last) + 1)] if dash else text.split(",")


@cache
def page_keys(page: str) -> PageKeys:
    """Return the content of a page's file; raise ExperimentError if it is not valid."""
    file = FOLDER / f"{page}.yaml"
    try:
        return PageKeys.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as error:
        raise ExperimentError(f"{file} is not valid: {error}") from error


def page_parts(page: str) -> dict[str, Part]:
    """Return the parts of a page by name, in the order of its file."""
    keys = page_keys(page)
    common = {name: getattr(keys.common, name) for name in keys.common.model_fields_set}
    return {
        name: Part(
            page, name, part.model_copy(update=common | part.model_dump(exclude_unset=True)), keys.machine, keys.texts
        )
        for name, part in keys.parts.items()
    }


def pages() -> list[str]:
    """Return the names of the pages that can be made again."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))
