"""Compact file of a results page: the data of its tables and figures, one line for each evaluation of a run.

``fold`` makes it from folders of finished runs, ``read`` returns it by run; ``results.py`` is the command line.
Accuracies are in percent, rounded to six digits.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from fedloom.reporting.significance import t_interval
from fedloom.runs.files import EXPERIMENT
from fedloom.runs.folder import RunFolder

FEW_CLIENTS = 20
"""Maximum number of clients for which the last evaluation has individual accuracies."""

UNINTERESTING = ("name", "seed", "runtime", "storage", "data.root", "evaluation.every")
"""Keys of an experiment that do not distinguish a page's runs."""


@dataclass(frozen=True)
class Evaluation:
    """Line of the file: a run evaluated after ``round``; ``left`` is the round in which it diverged, if it did.

    ``seed`` is text because a line may be a mean over seeds (``4-10``), with the deviation in ``..._sd``. ``commit`` is
    the commit that made the run, if it is known, and ``recorded`` the one in which its values first stood in the file.
    """

    run: str
    seed: str
    settings: Mapping[str, str]
    round: int
    left: int | None
    values: dict[str, float]
    clients: Mapping[str, float]
    commit: str = ""
    recorded: str = ""

    def __getitem__(self, quantity: str) -> float:
        return self.values[quantity]


Run = tuple[Evaluation, ...]
"""Evaluations of one run, in order of rounds."""


class Runs(dict[str, Run]):
    """Runs of a page by their folder, relative to the common folder."""

    def under(self, folder: str) -> list[Run]:
        """Return the runs of a sweep, sorted by name; ``folder`` may be a pattern."""
        return [run for name, run in sorted(self.items()) if fnmatch(name.rpartition("/")[0], folder)]

    def one(self, name: str) -> Run:
        """Return the run of this folder, or the first of the sweep in it."""
        return self[name] if name in self else self.under(name)[0]


def last(run: Run) -> Evaluation:
    """Return the last evaluation."""
    return run[-1]


def chosen(run: Run) -> Evaluation:
    """Return the evaluation with the highest validation accuracy, the earliest on ties."""
    return max(run, key=lambda line: (line["validation"], -line.round))


def after(run: Run, round: int) -> Evaluation | None:
    """Return the evaluation after a round; None if there is none."""
    return next((line for line in run if line.round == round), None)


def measured(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the quantities of a line of ``metrics.jsonl``, or of the output of ``fedloom evaluate``."""
    found: dict[str, Any] = {}
    if line.get("validation_pooled") is not None:
        found["validation"] = 100 * line["validation_pooled"]
    for group in ("seen", "unseen", "global"):
        about = line.get(group)
        if about is None:
            continue
        found[group] = _percent(about.get("accuracy_pooled"))
        for short in ("mean", "std", "worst", "worst_decile"):
            found[f"{group}_{short}"] = _percent(about.get(f"accuracy_{short}"))
        found[f"{group}_loss"] = about.get("loss_mean")
        masked = about.get("masked") or {}
        found[f"{group}_masked"] = _percent(masked.get("accuracy_pooled"))
        found[f"{group}_masked_worst"] = _percent(masked.get("accuracy_worst"))
        for part in ("seen", "unseen"):  # parts of the global model's result
            of = about.get(part) or {}
            found[f"{group}_{part}_mean"] = _percent(of.get("accuracy_mean"))
            found[f"{group}_{part}_worst_decile"] = _percent(of.get("accuracy_worst_decile"))
        uncertainty = (line.get("uncertainty") or {}).get(group) or {}
        for short in ("ece", "entropy", "mutual_information"):
            found[f"{group}_{short}"] = uncertainty.get(short)
    found["train_loss"] = (line.get("train") or {}).get("loss")
    if users := (line.get("wga") or {}).get("users"):
        found["user_loss"] = users["loss_mean"]
    sent = line.get("communication")
    if sent:
        found["sent_gb"] = (sent["payload_up"] + sent["payload_down"]) / 1e9
    found["spearman"] = ((line.get("pefll") or {}).get("spearman") or {}).get("mean")
    return {name: float(f"{value:.6g}") for name, value in found.items() if value is not None}


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def evaluations(folder: Path, name: str) -> tuple[dict[str, str], Run]:
    """Return settings and evaluations of a run that ended or diverged; no evaluations of one that was stopped."""
    files = RunFolder.open(folder)
    experiment = yaml.safe_load(files.text(EXPERIMENT))
    settings = dict(flat(experiment))
    lines = files.metrics()
    left = None
    if not (folder / "summary.json").exists():
        attempts = files.lines("journal.jsonl")
        if not attempts or attempts[-1]["outcome"] in ("done", "evaluated"):
            return settings, ()
        left = attempts[-1]["round"]
    about = [(line["round"], measured(line)) for line in lines]
    if left is not None:  # earlier results do not belong to its setting
        about = [(about[-1][0] if about else 0, {})]
    else:
        about[-1][1]["seconds"] = float(f"{files.json('summary.json').get('duration_s') or 0:.4g}")
    clients = _clients(folder) if left is None else {}
    seed = str(experiment["seed"])
    return settings, tuple(
        Evaluation(name, seed, {}, round, left, values, clients if i == len(about) - 1 else {})
        for i, (round, values) in enumerate(about)
    )


def _clients(folder: Path) -> dict[str, float]:
    if not (folder / "clients.csv").exists():
        return {}
    rows = RunFolder.open(folder).clients()
    if len(rows) > FEW_CLIENTS:
        return {}
    key = "personal_accuracy_unmasked"  # empty if the model predicts no classes
    return {row["id"]: 100 * float(row[key]) for row in rows if row[key]}


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of a nested mapping."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def fold(
    folder: Path,
    *,
    whole: Sequence[str] = (),
    searches: Sequence[str] = (),
    more: Callable[[Path], dict[str, float]] | None = None,
    before: Mapping[str, Run] | None = None,
) -> Runs:
    """Read all finished runs under a folder, and evaluations of other clients in ``*.json`` files beside them.

    Parameters
    ----------
    whole
        Patterns of runs that keep every evaluation; others keep the last and the chosen one.
    searches
        Patterns of runs that keep only the last validation accuracy, without settings, so that their test results are
        not recorded.
    more
        Measures additional quantities from a finished run's folder, for its last line.
    before
        Content of the compact file. Runs in it keep the keys of their settings, which distinguish them from others.
    """
    found: dict[str, tuple[dict[str, str], Run]] = {}
    for path in sorted(folder.rglob(EXPERIMENT)):
        name = path.parent.relative_to(folder).as_posix()
        settings, run = evaluations(path.parent, name)
        if run:
            if run[0].left is None and not any(fnmatch(name, pattern) for pattern in whole):
                run = tuple(line for line in run if line in (run[-1], chosen(run)))
            if more is not None and run[-1].left is None:
                run = (*run[:-1], replace(run[-1], values=run[-1].values | more(path.parent)))
            found[name] = settings, run
    tables = [name for name in found if not any(fnmatch(name, pattern) for pattern in searches)]
    varied = _varied([found[name][0] for name in tables])
    runs = Runs()
    for name, (settings, run) in found.items():
        if any(fnmatch(name, pattern) for pattern in searches):
            alone = {key: value for key, value in run[-1].values.items() if key == "validation"}
            runs[name] = (replace(run[-1], values=alone, clients={}),)
            continue
        keys = varied[settings["algorithm.name"]].union(*(line.settings for line in (before or {}).get(name, ())))
        kept = {key: value for key, value in settings.items() if key in keys}
        runs[name] = tuple(replace(line, settings=kept) for line in run)
    for path in sorted(folder.glob("*.json")):  # from `fedloom evaluate`
        about = json.loads(path.read_text(encoding="utf-8"))
        runs[path.stem] = (Evaluation(path.stem, str(about["seed"]), {}, about["round"], None, measured(about), {}),)
    for path in sorted(folder.rglob("authors.json")):  # from research/pefll_official.py
        name = f"{path.parent.relative_to(folder).as_posix()}/authors"
        lines = json.loads(path.read_text(encoding="utf-8"))
        runs[name] = tuple(Evaluation(name, "", {}, line.pop("round"), None, line, {}) for line in lines)
    for path in sorted(folder.rglob("new-clients.json")):  # from research/pefll_pairs.py
        for known, values in json.loads(path.read_text(encoding="utf-8")).items():
            name = f"{path.parent.relative_to(folder).as_posix()}/new-clients/{known}"
            runs[name] = (Evaluation(name, "", {"known": known}, 0, None, values, {}),)
    return runs


def _varied(experiments: Sequence[Mapping[str, str]]) -> dict[str, set[str]]:
    """Return, by method, the keys in which its runs differ, and the method's key."""
    found = {}
    for method in {settings["algorithm.name"] for settings in experiments}:
        those = [settings for settings in experiments if settings["algorithm.name"] == method]
        keys = {key for settings in those for key in settings if not key.startswith(UNINTERESTING)}
        found[method] = {"algorithm.name"} | {key for key in keys if len({settings.get(key) for settings in those}) > 1}
    return found


FIRST = ("run", "seed", "settings", "round", "left")
"""Columns before the quantities; a run's first line has its settings."""

ORIGIN = ("commit", "recorded")
"""Further columns of a run's first line, if any run has them."""


def written(runs: Runs, columns: Sequence[str] = ()) -> str:
    """Return the compact file with these quantities, or all that any run has."""
    lines = [line for run in runs.values() for line in run]
    there = {quantity: None for line in lines for quantity in line.values}
    columns = [column for column in columns or there if column in there]
    clients = any(line.clients for line in lines)
    origin = [name for name in ORIGIN if any(getattr(line, name) for line in lines)]
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*FIRST, *origin, *columns, *(["clients"] if clients else [])])
    for line in lines:
        new = line is runs[line.run][0]
        settings = " ".join(f"{key}={value}" for key, value in line.settings.items() if new)
        start = [line.run, line.seed, settings, line.round, "" if line.left is None else line.left]
        start += [getattr(line, name) if new else "" for name in origin]
        cells = [f"{line[column]:.10g}" if column in line.values else "" for column in columns]
        each = " ".join(f"{id}={value:.6g}" for id, value in line.clients.items())
        writer.writerow([*start, *cells, *([each] if clients else [])])
    return out.getvalue()


def read(path: Path) -> Runs:
    """Return the runs of a compact file."""
    lines: dict[str, list[Evaluation]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            about = {key: row.pop(key) for key in FIRST}
            origin = {key: row.pop(key, "") for key in ORIGIN}
            clients = dict(part.rsplit("=", 1) for part in row.pop("clients", "").split())
            before = lines.setdefault(about["run"], [])
            settings = dict(part.split("=", 1) for part in about["settings"].split())
            line = Evaluation(
                about["run"],
                about["seed"],
                before[0].settings if before else settings,
                int(about["round"] or 0),
                int(about["left"]) if about["left"] else None,
                {key: float(value) for key, value in row.items() if value},
                {id: float(value) for id, value in clients.items()},
                *((before[0].commit, before[0].recorded) if before else origin.values()),
            )
            before.append(line)
    return Runs({name: tuple(those) for name, those in lines.items()})


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table with its first columns left-aligned."""
    rule = "|" + "---|" * left + "---:|" * (len(header) - left)
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (header, *rows))
    return "\n".join((first, rule, *others))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, with ± the sample standard deviation if there are several values."""
    shown = f"{statistics.fmean(values):.{digits}f}"
    return f"{shown} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else shown


def difference(of: Sequence[float], less: Sequence[float]) -> str:
    """Return the mean difference between results with the same seed, with Student's 95 % interval over seeds."""
    each = [a - b for a, b in zip(of, less, strict=True)]
    low, high = t_interval(each)
    return f"{statistics.fmean(each):+.1f} ({low:+.1f} to {high:+.1f})".replace("-", "−")


def chosen_value(folder: Path, key: str = "algorithm.local.lr") -> str:
    """Return the value of ``key`` at the sweep's point with the highest mean validation accuracy in the last round.

    The mean is over seeds. A point is what its runs' overrides have in common except the seed. A point that diverged
    with any seed is excluded.
    """
    points: dict[tuple[tuple[str, str], ...], list[Evaluation]] = {}
    for path in sorted(folder.glob(f"*/{EXPERIMENT}")):
        settings, run = evaluations(path.parent, path.parent.name)
        if run:
            points.setdefault(tuple(sorted((k, v) for k, v in settings.items() if k != "seed")), []).append(run[-1])
    seeds = set.intersection(*({line.seed for line in lines} for lines in points.values()))
    best = max(
        (point for point, lines in sorted(points.items()) if all(line.left is None for line in lines)),
        key=lambda point: statistics.fmean(line["validation"] for line in points[point] if line.seed in seeds),
    )
    return dict(best)[key]
