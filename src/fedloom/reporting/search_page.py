"""Page of a hyperparameter search, from its ``search.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.core.words import pluralize, rounded_up
from fedloom.experiment.yaml_reader import as_yaml
from fedloom.reporting.page import (
    DASH,
    Fact,
    PageSection,
    Panel,
    Part,
    ReportPage,
    check_installed,
    one_block,
    table_row,
)
from fedloom.reporting.words import Document
from fedloom.runs.files import RunFiles
from fedloom.tasks.names import Headline

PAGE = "search.html"

MANY_PARAMETERS = 12
"""Maximum number of parameters that are drawn."""


def write_search_page(folder: Path, search: Document) -> Path:
    """Write ``search.html`` to the folder of a finished search; return its path.

    Raises
    ------
    ExperimentError
        If matplotlib or jinja2 is not installed.
    """
    check_installed("matplotlib", "jinja2")
    RunFiles(folder).write(PAGE, search_page(search).render())
    return folder / PAGE


def trial_rows(search: Document) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings of a table of trials, and its rows in the order of the trials, without test results."""
    headline = _headline(search)
    keys = list(search["trials"][0]["parameters"])
    private = any(trial["epsilon"] is not None for trial in search["trials"])
    headings = ("trial", *keys, f"validation {headline.heading}", *(["ε"] if private else []), "")
    rows = []
    for trial in search["trials"]:
        cells = [str(trial["trial"]), *(parameter_text(trial["parameters"][key]) for key in keys)]
        cells.append(DASH if trial["validation"] is None else headline.shown(trial["validation"]))
        if private:
            cells.append(DASH if trial["epsilon"] is None else rounded_up(trial["epsilon"]))
        is_chosen = search["chosen"] is not None and trial["trial"] == search["chosen"]["trial"]
        rows.append((*cells, "chosen" if is_chosen else "" if trial["state"] == "done" else _ended(trial)))
    return headings, rows


def parameter_text(value: Any) -> str:
    """Return a parameter's value for a table: numbers with four significant digits, other values as YAML."""
    return f"{value:.4g}" if isinstance(value, float) else as_yaml(value)


def search_page(search: Document) -> ReportPage:
    """Return the page: the chosen trial, figures of all trials, and their table."""
    from fedloom.reporting.compare_figures import draw_parameter, draw_trials
    from fedloom.reporting.drawing import COLOURS

    headline, chosen, trials = _headline(search), search["chosen"], search["trials"]
    facts = [Fact(f"validation {headline.title}", _with_unit(headline, chosen["validation"]), "chosen by this")]
    facts += [
        Fact(f"test {headline.title}, {group}", _with_unit(headline, values["mean"]), "mean over clients", group)
        for group, values in chosen["test"].items()
        if values["mean"] is not None
    ]
    parameters_drawn = [key for key in chosen["parameters"] if _spread(trials, key)][:MANY_PARAMETERS]
    panels = [Panel("trials", draw_trials(trials, chosen["trial"], headline), wide=True)]
    panels += [
        Panel(f"parameter-{i}", draw_parameter(trials, key, chosen["trial"], headline))
        for i, key in enumerate(parameters_drawn)
    ]
    headings, rows = trial_rows(search)
    table = one_block(headings, (table_row(*cells) for cells in rows))
    states = [trial["state"] for trial in trials]
    description = [f"sampler {search['sampler']}, seed {search['seed']}", pluralize(len(trials), "trial")]
    description += [f"{states.count(state)} {state}" for state in ("stopped", "failed") if state in states]
    values = tuple((key, as_yaml(value)) for key, value in chosen["parameters"].items())
    reason = (
        f"{chosen['folder']} has the {headline.superlative} {headline.title} on the validation examples of the seen "
        "clients in the last round. Test results are shown for it alone."
    )
    return ReportPage(
        f"Search: {search['experiment']}",
        (" · ".join(description),),
        (
            PageSection("Chosen values", (Part(pairs=values, text=reason),)),
            PageSection("Trials", (Part(panels=tuple(panels), columns=2), Part(tables=(table,)))),
        ),
        COLOURS,
        facts={"quality": tuple(facts)},
        broad=True,
    )


def _headline(search: Document) -> Headline:
    objective = search["objective"]
    return Headline(objective["name"], objective["higher_is_better"], objective["percent"])


def _with_unit(headline: Headline, value: float) -> str:
    return f"{headline.shown(value)}{headline.unit}"


def _ended(trial: Document) -> str:
    last = max(map(int, trial["validation_by_round"]), default=0)
    return f"stopped after round {last}" if trial["state"] == "stopped" else str(trial["state"])


def _spread(trials: Sequence[Document], key: str) -> bool:
    """Return whether a parameter has different values, all numbers, in the trials that are done."""
    values = [trial["parameters"][key] for trial in trials if trial["state"] == "done"]
    return all(type(value) in (int, float) for value in values) and len(set(values)) > 1
