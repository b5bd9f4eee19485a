"""Kinds of targets, and metrics and headlines of results; reading a manifest imports this, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

TaskName: TypeAlias = Literal["classification", "multilabel", "regression", "segmentation", "next_token"]
"""Names of the tasks, and of the kinds of their targets."""

IGNORED_PIXEL, IGNORED_TOKEN = 255, -100
"""Default values of targets that are left out: pixels without a class, padding."""


@dataclass(frozen=True)
class TargetKind:
    """Properties of a kind of targets; other packages decide by these, never by the name.

    Attributes
    ----------
    shapes, ranks
        Shapes of the targets of n examples, for messages; numbers of axes of one target.
    outputs, output, metrics_by_output
        What the K outputs are, for messages; what one is, and the metrics that reports show for each.
    is_class, is_binary, is_number
        True if a target is one of K classes; 0 or 1 for each of K labels; numbers, which are standardized.
    like, ignored
        Inputs whose shape a target has, with one of K classes at each place (None: it has a shape of its own), and the
        value that marks a place without a class.
    shown_clients
        Number of clients, those with the worst results, of which reports show examples.
    """

    shapes: str = ""
    outputs: str = "classes"
    ranks: range = range(0)
    is_class: bool = False
    is_binary: bool = False
    is_number: bool = False
    like: Literal["plane", "sequence"] | None = None
    ignored: int | None = None
    output: str = "class"
    metrics_by_output: tuple[str, ...] = ()
    shown_clients: int = 0


PLACES = "[n, height, width] or [n, depth, height, width], the class of each pixel"
NUMBERS = "[n] or [n, k], numbers, or [n, ...], a field of numbers"

# fmt: off
KINDS: Mapping[TaskName, TargetKind] = {
    "classification": TargetKind(is_class=True),
    "multilabel": TargetKind("[n, K], 0 or 1 for each of K labels", "labels", range(1, 2), is_binary=True,
                             output="label", metrics_by_output=("auroc", "f1")),
    "regression": TargetKind(NUMBERS, "numbers", range(8), is_number=True, shown_clients=12),
    "segmentation": TargetKind(PLACES, "classes of each pixel", range(2, 4), like="plane", ignored=IGNORED_PIXEL,
                               metrics_by_output=("iou", "dice"), shown_clients=4),
    "next_token": TargetKind("[n, length], token ids", "next tokens", range(1, 2), like="sequence",
                             ignored=IGNORED_TOKEN),
}
# fmt: on
"""Kinds of targets by the names of their tasks."""


ABBREVIATIONS = {
    "auroc": "AUROC", "brier": "Brier", "dice": "Dice", "ece": "ECE", "f1": "F1", "iou": "IoU", "mae": "MAE",
    "mse": "MSE", "r2": "R²", "rmse": "RMSE",
}  # fmt: skip
"""Parts of metrics' names that are not ordinary words, and how tables write them."""


def metric_title(name: str) -> str:
    """Return a metric's name as the heading of a column, e.g. ``macro AUROC`` for ``macro_auroc``."""
    return " ".join(ABBREVIATIONS.get(part, part) for part in name.split("_"))


def significant(value: float) -> str:
    """Return a number with four significant digits, and a large one as a whole number."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


class Headline(NamedTuple):
    """Metric, such as the one by which rounds and methods are compared.

    Attributes
    ----------
    name
        Its key under ``metrics``.
    higher_is_better
        False for errors and losses.
    percent
        True if it is a fraction that tables show in percent.
    """

    name: str
    higher_is_better: bool
    percent: bool

    @property
    def title(self) -> str:
        """Name in sentences and figures."""
        return metric_title(self.name)

    @property
    def capitalized(self) -> str:
        """Name at the beginning of a sentence."""
        return f"{self.title[0].upper()}{self.title[1:]}"

    @property
    def heading(self) -> str:
        """Name with its unit, for a table's column."""
        return f"{self.title}, %" if self.percent else self.title

    @property
    def unit(self) -> str:
        """Unit that follows a value in a sentence; empty without one."""
        return " %" if self.percent else ""

    @property
    def sign(self) -> int:
        """Factor that makes higher values better: 1, or -1 where lower ones are."""
        return 1 if self.higher_is_better else -1

    @property
    def superlative(self) -> str:
        """Adjective of the best value."""
        return "highest" if self.higher_is_better else "lowest"

    @property
    def inferior(self) -> str:
        """Adjective of the worst value."""
        return "lowest" if self.higher_is_better else "highest"

    def shown(self, value: float) -> str:
        """Return a value for a table under :attr:`heading`: in percent with one decimal, or four significant digits."""
        return f"{100 * value:.1f}" if self.percent else significant(value)

    def shown_difference(self, difference: float) -> str:
        """Return a difference with its sign, in percentage points or with three digits."""
        if not difference:
            return "0"
        return f"{100 * difference:+.1f}" if self.percent else f"{difference:+.3g}"

    def exact(self, value: float) -> str:
        """Return a value for a line of text: a fraction with four decimals, or four significant digits."""
        return f"{value:.4f}" if self.percent else significant(value)


def _named(names: str, *, higher_is_better: bool, percent: bool) -> dict[str, Headline]:
    return {name: Headline(name, higher_is_better, percent) for name in names.split()}


METRICS: Mapping[str, Headline] = {
    **_named("accuracy balanced_accuracy micro_f1 macro_f1 exact_match", higher_is_better=True, percent=True),
    **_named("mean_iou dice pixel_accuracy", higher_is_better=True, percent=True),
    **_named("auroc r2", higher_is_better=True, percent=False),
    **_named("log_loss brier ece rmse mae mse perplexity loss", higher_is_better=False, percent=False),
}
"""Metrics of FedLoom's tasks, by name."""

ALIASES: Mapping[str, str] = {"f1": "macro_f1", "auc": "auroc", "iou": "mean_iou", "cross_entropy": "log_loss"}
"""Other names of metrics that an experiment may ask for."""

ACCURACY = METRICS["accuracy"]
"""Headline metric of classification."""

MODEL_LOSS = METRICS["loss"]
"""Headline metric of a model that is trained by its own loss on data without targets."""


def metric_heading(metric: str) -> str:
    """Return a metric's name with its unit, for a table's column."""
    return METRICS[metric].heading if metric in METRICS else metric_title(metric)


def shown_metric(metric: str, value: float) -> str:
    """Return a metric's value for a column under :func:`metric_heading`."""
    return METRICS[metric].shown(value) if metric in METRICS else significant(value)


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
    if (headline := results.get("headline")) is not None:
        return Headline(headline["name"], headline["higher_is_better"], headline["percent"])
    groups = [group for name in GROUPS if (group := results.get(name)) is not None]
    return MODEL_LOSS if any(group["accuracy_mean"] is None for group in groups) else ACCURACY


def values_of(group: Mapping[str, Any], headline: Headline) -> MetricValues:
    """Return a group's values of its headline metric."""
    return metrics_of(group).get(headline.name, MetricValues())


def metrics_of(group: Mapping[str, Any]) -> dict[str, MetricValues]:
    """Return a group's values of every metric, in the order of the results, the mean loss last."""
    metrics = {
        name: MetricValues(**{key: values.get(key) for key in MetricValues._fields})
        for name, values in (group.get("metrics") or {}).items()
        if values is not None
    }
    if group.get("accuracy_mean") is not None:
        metrics[ACCURACY.name] = MetricValues(*(group.get(f"accuracy_{key}") for key in MetricValues._fields))
    if MODEL_LOSS.name not in metrics and group.get("loss_mean") is not None:
        metrics[MODEL_LOSS.name] = MetricValues(group["loss_mean"])
    return metrics


RESULT_HEADINGS = ("", "clients", "mean ± std", "worst decile", "worst", "pooled", "loss")
"""Headings of the table of results."""


def result_rows(results: Mapping[str, Any], display: Callable[[float], str]) -> list[tuple[str, ...]]:
    """Return the rows of the table of results: a group of clients each, with dashes for unknown values.

    Parameters
    ----------
    display
        Returns a value of the headline metric as text.
    """
    headline, rows = headline_of(results), []
    for name in GROUPS:
        if (group := results[name]) is None:
            continue
        values = values_of(group, headline)
        mean, std, *rest = (
            "–" if value is None else display(value)
            for value in (values.mean, values.std, values.worst_decile, values.worst, values.pooled)
        )
        label = "global model" if name == "global" else name
        middle = mean if values.std is None else f"{mean} ± {std}"
        rows.append((label, str(int(group["clients"])), middle, *rest, f"{group['loss_mean']:.4f}"))
    return rows


def validation_value(line: Mapping[str, Any]) -> float | None:
    """Return the headline metric on the validation examples of seen clients; None without such examples."""
    value = line.get("validation_pooled")
    return line.get("validation_loss") if value is None else value


def in_words(headline: Headline, groups: Mapping[str, MetricValues]) -> tuple[str, list[str]]:
    """Return a title of test results and each group's value: pooled over examples, else the mean over clients."""
    pooled = all(values.pooled is not None for values in groups.values())
    values_by_group = {name: values.pooled if pooled else values.mean for name, values in groups.items()}
    parts = [f"{name} {'-' if value is None else headline.exact(value)}" for name, value in values_by_group.items()]
    return f"{'pooled' if pooled else 'mean'} test {headline.title}", parts


def next_tokens(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Return the target of each output, ``[n, T], [n, T] -> [n, T]``: ``y``, or the inputs moved by one place.

    If ``y`` equals ``x`` wherever it is not ignored (-100), as language models expect their labels, the target of
    output t is ``y[t + 1]``, and the last output has none. Else ``y[t]`` is the target of output t.
    """
    import numpy as np

    ignored_value = IGNORED_TOKEN
    same = y == x if x.shape == y.shape else np.zeros(1, dtype=bool)
    if not same.any() or not (same | (y == ignored_value)).all():
        return y
    targets = np.full(y.shape, ignored_value, dtype=np.int64)
    targets[:, :-1] = y[:, 1:]
    return targets
