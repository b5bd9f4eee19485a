"""Headline metric in results: a line of ``metrics.jsonl``, or ``summary.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedloom.tasks.names import ACCURACY, MODEL_LOSS, Headline

GROUPS = ("seen", "unseen", "global")
"""Groups of clients in results."""


class MetricValues(NamedTuple):
    """Values of a metric for a group of clients; None where it is not known.

    ``mean`` and ``std`` are over clients, each counting once; ``worst_decile`` is the mean of the worst tenth, and
    ``pooled`` is over all examples together.
    """

    mean: float | None = None
    std: float | None = None
    worst: float | None = None
    worst_decile: float | None = None
    pooled: float | None = None


def headline_of(results: Mapping[str, Any]) -> Headline:
    """Return the headline metric of results.

    Results of an older version, without a headline, are accuracies, or losses if the data have no classes.
    """
    if (found := results.get("headline")) is not None:
        return Headline(found["name"], found["higher_is_better"], found["percent"])
    groups = [group for name in GROUPS if (group := results.get(name)) is not None]
    return MODEL_LOSS if any(group["accuracy_mean"] is None for group in groups) else ACCURACY


def values_of(group: Mapping[str, Any], headline: Headline) -> MetricValues:
    """Return a group's values of its headline metric."""
    return metrics_of(group).get(headline.name, MetricValues())


def metrics_of(group: Mapping[str, Any]) -> dict[str, MetricValues]:
    """Return a group's values of every metric, in the order of the results, the mean loss last."""
    found = {
        name: MetricValues(**{key: values.get(key) for key in MetricValues._fields})
        for name, values in (group.get("metrics") or {}).items()
        if values is not None
    }
    if group.get("accuracy_mean") is not None:
        found[ACCURACY.name] = MetricValues(*(group.get(f"accuracy_{key}") for key in MetricValues._fields))
    if MODEL_LOSS.name not in found and group.get("loss_mean") is not None:
        found[MODEL_LOSS.name] = MetricValues(group["loss_mean"])
    return found


RESULT_HEADINGS = ("", "clients", "mean ± std", "worst decile", "worst", "pooled", "loss")
"""Headings of the table of results."""


def result_rows(results: Mapping[str, Any], shown: Callable[[float], str]) -> list[tuple[str, ...]]:
    """Return the rows of the table of results: a group of clients each, with dashes for unknown values.

    Parameters
    ----------
    shown
        Returns a value of the headline metric as text.
    """
    headline, rows = headline_of(results), []
    for name in GROUPS:
        if (group := results[name]) is None:
            continue
        found = values_of(group, headline)
        mean, std, *rest = (
            "–" if value is None else shown(value)
            for value in (found.mean, found.std, found.worst_decile, found.worst, found.pooled)
        )
        label = "global model" if name == "global" else name
        middle = mean if found.std is None else f"{mean} ± {std}"
        rows.append((label, str(int(group["clients"])), middle, *rest, f"{group['loss_mean']:.4f}"))
    return rows


def validation_value(line: Mapping[str, Any]) -> float | None:
    """Return the headline metric on the validation examples of seen clients; None without such examples."""
    value = line.get("validation_pooled")
    return line.get("validation_loss") if value is None else value


def in_words(headline: Headline, groups: Mapping[str, MetricValues]) -> tuple[str, list[str]]:
    """Return a title of test results and each group's value: pooled over examples, else the mean over clients."""
    pooled = all(values.pooled is not None for values in groups.values())
    found = {name: values.pooled if pooled else values.mean for name, values in groups.items()}
    parts = [f"{name} {'-' if value is None else headline.exact(value)}" for name, value in found.items()]
    return f"{'pooled' if pooled else 'mean'} test {headline.title}", parts
