"""Results pages made again: their parts are listed, made by their commands, and compared with the published figures.

This is ``fedloom reproduce``. research/parts has the parts, a file a page (``page_parts.py``).
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import yaml
from comparison import Comparison, compared
from made import commit, ended, note, with_commits
from page_parts import FEDLOOM, PYTHON, ROOT, Part, Step, page_parts, pages
from summaries import chosen_value

from fedloom.cli.tables import print_table
from fedloom.core.processes import END_WITH_PARENT, command, python
from fedloom.core.words import pluralize
from fedloom.errors import DataError, ExperimentError, FedloomError, InterruptedRun

DIVERGED, INTERRUPTED = 5, 130
"""Exit codes of ``fedloom run``."""

PROBE_S = 0.4
"""Processor time of the speed probe on the machine of the pages, an AMD EPYC with AVX-512."""


def reproduce(
    targets: Sequence[str], *, runs: Path, seeds: str | None = None, dry_run: bool = False, as_json: bool = False
) -> None:
    """Make the targets again, PAGE, PAGE/PART or PAGE/TABLE (a number), and compare; without any, list all parts.

    Raises
    ------
    ExperimentError
        For a target that does not exist, or seeds that no command of a part has.
    DataError
        If a figure is missing or outside its tolerance, or a run's folder is damaged.
    InterruptedRun
        If the command was stopped. The same command continues.
    """
    runs = runs.absolute()
    parts = [part for target in targets for part in parts_of(target)]
    if not parts:
        show_list([part for page in pages() for part in page_parts(page).values()], as_json=as_json)
        return
    wanted = None if seeds is None else seed_list(seeds)
    commands = [(part, [*part.fetches(), *part.steps(runs / part.folder, wanted)]) for part in parts]
    if dry_run:
        for part, steps in commands:
            shown = [resumed(step, steps[:i]).shown() for i, step in enumerate(steps)]
            print(json.dumps({"part": part.title, "commands": shown}) if as_json else "\n".join(shown))
        return
    failed = []
    for part, steps in commands:
        for step in steps:
            make(part, step, runs / part.folder, quiet=as_json)
        found = comparisons(part, runs / part.folder, wanted)
        show(part, found, runs / part.folder, as_json=as_json)
        failed += [(part, each) for each in found if not each.agrees]
    if failed:
        raise DataError(disagreement(failed))


# --- targets ----------------------------------------------------------------------------------------------------------


def parts_of(target: str) -> list[Part]:
    """Return the parts that a target names; raise ExperimentError with similar names if there is none."""
    page, slash, name = target.strip("/").partition("/")
    if page not in pages():
        raise unknown("page", page, pages())
    parts = page_parts(page)
    if not slash:
        return list(parts.values())
    if name in parts:
        return [parts[name]]
    if name.isdecimal() and (those := [part for part in parts.values() if int(name) in part.keys.tables]):
        return those
    numbers = sorted({str(number) for part in parts.values() for number in part.keys.tables}, key=int)
    raise unknown(f"part or table of {page}", name, [*parts, *numbers])


def unknown(kind: str, found: str, allowed: Sequence[str]) -> ExperimentError:
    """Return the error for a name that does not exist, with the names most like it."""
    near = difflib.get_close_matches(found, allowed, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(allowed)}."
    return ExperimentError(
        f"there is no {kind} {found!r}. {hint}", key="target", found=found, allowed=", ".join(allowed)
    )


def seed_list(text: str) -> list[str]:
    """Return the seeds of ``2,5`` or ``1-3``; raise ExperimentError for anything else."""
    first, dash, last = text.partition("-")
    ends = [first, last] if dash else text.split(",")
    if not all(end.isdecimal() for end in ends) or (dash and int(first) > int(last)):
        raise ExperimentError(f"--seeds must be like 1,2,3 or 1-3 (got {text}).", key="seeds", found=text)
    return [str(seed) for seed in range(int(first), int(last) + 1)] if dash else ends


# --- the list ---------------------------------------------------------------------------------------------------------


def show_list(parts: Sequence[Part], *, as_json: bool) -> None:
    """Print every part, with the time that it takes on one core of this machine."""
    slower = slowness()
    if as_json:
        entries = [
            {
                "part": part.title,
                "tables": list(part.keys.tables),
                "about": part.keys.about,
                "data": list(part.keys.data or ()),
                "needs": part.keys.needs,
                "seconds": None if part.keys.minutes is None else round(60 * part.keys.minutes * slower),
            }
            for part in parts
        ]
        print(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    for part in parts:
        keys = part.keys
        took = "not measured" if keys.minutes is None else rough(keys.minutes * slower)
        tables = (
            f"; {'table' if len(keys.tables) == 1 else 'tables'} {', '.join(map(str, keys.tables))}"
            if keys.tables
            else ""
        )
        needs = f"; needs {keys.needs}" if keys.needs else ""
        print(f"{part.title:<34} {took:>12}   {keys.about}{tables}{needs}")
    print(
        "\nTimes are processor times of one core, as the pages' machine took them, "
        f"times {slower:.1f}: what a short probe takes here, relative to an {parts[0].machine}."
    )


def rough(minutes: float) -> str:
    """Return a time in its largest unit."""
    units = (("d", 1440.0), ("h", 60.0), ("min", 1.0))
    name, size = next(((name, size) for name, size in units if minutes >= 1.5 * size), units[-1])
    return f"{max(minutes / size, 1):.0f} {name}"


def slowness() -> float:
    """Return the processor time of a probe on this machine, relative to the pages' machine; at least a tenth."""
    x, w = np.ones((16, 64), np.float32), np.ones((64, 32), np.float32)  # too small for several threads

    def probe() -> float:
        start = time.process_time()
        for i in range(20_000):
            x[i % 16] = (x @ w).max()
            x.clip(0, 1, out=x)
        return time.process_time() - start

    return max(0.1, min(probe() for _ in range(3)) / PROBE_S)


# --- making -----------------------------------------------------------------------------------------------------------


def resumed(step: Step, earlier: Sequence[Step] = ()) -> Step:
    """Return the command with ``--resume`` if it is a run whose folder exists, or is made by an earlier command."""
    out = run_folder(step)
    if out is not None and (Path(out).exists() or out in map(run_folder, earlier)):
        return replace(step, words=(*step.words, "--resume"))
    return step


def run_folder(step: Step) -> str | None:
    """Return the folder that a ``fedloom run`` makes; None for other commands."""
    return step.words[step.words.index("--out") + 1] if step.words[:2] == (FEDLOOM, "run") else None


def make(part: Part, step: Step, folder: Path, *, quiet: bool = False) -> None:
    """Run a command of a part, unless it is no run and has ended before; raise an error if it fails."""
    if step.out and step.words[:2] != (FEDLOOM, "run") and ended(folder, step) and (folder / step.out).exists():
        return
    begun = resumed(step)
    print(f"\n$ {begun.shown()}", file=sys.stderr if quiet else sys.stdout, flush=True)
    if step.out and not ended(folder, step):
        note(folder, step, event="begin")
    code = execute(begun.words, quiet=quiet)
    if code == INTERRUPTED:
        raise InterruptedRun(f"{part.title} was interrupted; the same command continues it")
    if code and not (code == DIVERGED and part.keys.diverges):
        raise failure(code, f"{part.title}: `{begun.shown()}` ended with exit code {code}; its message is above.")
    if step.out and not ended(folder, step):
        note(folder, step, event="end")


def failure(code: int, text: str) -> FedloomError:
    """Return the error with a command's exit code, so that the caller's exit code is the same."""
    kinds = [kind for kind in FedloomError.__subclasses__() if int(kind.exit_code) == code]
    return kinds[0](text) if kinds else DataError(text)


def execute(words: Sequence[str], *, quiet: bool) -> int:
    """Run a command in the clone's folder and return its exit code; a signal to this process ends it, too."""
    first, *others = (word for given in words for word in expanded(given))
    line = command(*others) if first == FEDLOOM else python(*others)
    environment = {**os.environ, **({END_WITH_PARENT: "1"} if first == FEDLOOM else {})}
    if first == PYTHON:  # its modules lie beside it
        line = [line[0], *others]
    child = subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=sys.stderr if quiet else None,
        start_new_session=True,
    )
    try:
        return child.wait()
    except BaseException as error:
        child.send_signal(signal.SIGTERM)
        child.wait()
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        raise
    finally:
        if child.stdin is not None:
            child.stdin.close()


def expanded(word: str) -> list[str]:
    """Return the paths that match a word with ``*``, the content of the file after ``@``, or else the word.

    Raise DataError if nothing matches, or the file is missing.
    """
    if word.startswith("@"):
        try:
            return [Path(word[1:]).read_text(encoding="utf-8").strip()]
        except OSError as error:
            raise DataError(f"{word[1:]} is missing; make the parts before this one first") from error
    if "*" not in word:
        return [word]
    path = Path(word)
    found = sorted(str(each) for each in Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise DataError(f"no folder matches {word}; make the parts before this one first")
    return found


# --- comparison -------------------------------------------------------------------------------------------------------


def comparisons(part: Part, folder: Path, seeds: Sequence[str] | None) -> list[Comparison]:
    """Return a part's figures beside the published ones; raise DataError if a run's folder is damaged."""
    import results  # here, because its pages import torch

    page = results.PAGES[part.page]
    published = results.published(part.page)
    if not published:
        return []
    try:
        measured = with_commits(folder, results.folded(page, folder, published))
    except DataError as error:
        raise DataError(f"{error}. Delete the folder of that run, and repeat the command to make it again.") from error
    except (ValueError, KeyError, IndexError, yaml.YAMLError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(
            f"a run below {folder} is damaged ({what}); delete its folder, and repeat the command"
        ) from error
    return compared(part, published, measured, page.paper, seeds)


def choices(part: Part, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each key that a search of a part chooses, with the published value and the one that is chosen here."""
    for search, keys in part.keys.chooses.items():
        for key, value in keys.items() if (folder / search).exists() else ():
            yield f"{search}: {key}", value, chosen_value(folder / search, key)


def show(part: Part, found: Sequence[Comparison], folder: Path, *, as_json: bool) -> None:
    """Print a part's figures: published, measured and the paper's, with the tolerance, and what validation chose."""
    chose = list(choices(part, folder))
    if as_json:
        lines = [{**asdict(each), "agrees": each.agrees} for each in found]
        facts = {"part": part.title, "commit": commit(), "figures": lines, "choices": chose}
        print(json.dumps(facts, ensure_ascii=False))
        return
    if not found:
        return
    heading = ("run", "quantity", "published", "tolerance", "here", "paper", "")
    print_table(f"\n{part.title}: {part.keys.about}", heading, [cells(each) for each in found], texts=(0, 1, 6))
    for what, published, here in chose:
        print(f"{what}: published {published}, chosen here {here}")
    agreeing = sum(each.agrees for each in found)
    recorded = ", ".join(dict.fromkeys(each.commit for each in found))
    print(
        f"\n{agreeing} of {pluralize(len(found), 'figure')} agree. "
        f"Here: commit {commit() or 'unknown'}; published: {recorded}."
    )
    print(f"Published on {part.machine}. Tolerance: {TOLERANCE}")


def cells(figure: Comparison) -> tuple[str, ...]:
    """Return a figure's row of the table."""
    in_name = not figure.seed or f"seed={figure.seed}" in figure.run
    return (
        figure.run if in_name else f"{figure.run}, seed {figure.seed}",
        figure.quantity,
        number(figure.published),
        f"± {number(figure.far)}",
        "missing" if figure.measured is None else number(figure.measured),
        "" if figure.paper is None else number(figure.paper),
        "" if figure.agrees or figure.measured is None else "outside",
    )


TOLERANCE = (
    "what the page measured between processors, or else how far two trainings with other seeds are apart "
    "(95 % prediction interval)."
)


def number(value: float) -> str:
    """Return a figure with four significant digits."""
    return f"{value:.4g}"


def disagreement(failed: Sequence[tuple[Part, Comparison]]) -> str:
    """Return the message that names the figures which do not agree."""
    first = [
        f"{part.page}: {each.run} {each.quantity} is {'missing' if each.measured is None else number(each.measured)}, "
        f"published {number(each.published)} ± {number(each.far)}"
        for part, each in failed[:5]
    ]
    more = f"; and {len(failed) - 5} more" if len(failed) > 5 else ""
    return f"{pluralize(len(failed), 'figure')} outside the tolerance: {'; '.join(first)}{more}"
