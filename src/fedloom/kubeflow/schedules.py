"""Recurring runs of a pipeline: creating, listing, pausing, resuming and deleting them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedloom.errors import ExperimentError, InterruptedRun, argument
from fedloom.kubeflow.api import Kubeflow
from fedloom.kubeflow.submit import Order, Say, Started, on_failure, submission_mark, upload_pipeline
from fedloom.kubeflow.versions import recurring_runs

SERVICE = "RecurringRunServiceApi"
METHOD = "recurring_run_service_{}_recurring_run"

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class CronField(NamedTuple):
    """Field of a cron expression: its name, the range of its values, and names of values."""

    name: str
    low: int
    high: int
    names: Mapping[str, int]


FIELDS = (
    CronField("second", 0, 59, {}),
    CronField("minute", 0, 59, {}),
    CronField("hour", 0, 23, {}),
    CronField("day of month", 1, 31, {}),
    CronField("month", 1, 12, {name: number for number, name in enumerate(MONTHS, start=1)}),
    CronField("day of week", 0, 6, {name: number for number, name in enumerate(DAYS)}),
)
"""Fields of Kubeflow's cron (``github.com/robfig/cron`` v1.2.0, ``bounds`` in ``spec.go``), seconds first."""

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def cron_with_seconds(text: str) -> str:
    """Return a cron expression in Kubeflow's form, which has six fields, seconds first.

    Five fields, as of crontab, get the second 0. Kubeflow itself would take five fields for second to month, without an
    error (``cron.Parse`` of robfig/cron v1.2.0).

    Raises
    ------
    ExperimentError
        If the expression is invalid, with the field that is.
    """
    parts = text.split()
    if len(parts) not in (5, 6):
        raise _bad_cron(text, f"it must have 5 fields, or 6 with seconds first (got {len(parts)}), such as '0 2 * * *'")
    parts = parts if len(parts) == 6 else ["0", *parts]
    for field, part in zip(FIELDS, parts, strict=True):
        for item in part.split(","):
            if (why := _wrong(field, item)) is not None:
                raise _bad_cron(text, f"{field.name} {item!r} {why}")
    return " ".join(parts)


def _bad_cron(text: str, why: str) -> ExperimentError:
    return ExperimentError(f"{argument('cron')} is {text!r}: {why}.", key="cron", found=text)


def _wrong(field: CronField, item: str) -> str | None:
    """Return why an item such as ``*``, ``5``, ``mon-fri`` or ``0-30/5`` is invalid, None if it is not."""
    values, slash, step = item.partition("/")
    if slash and not re.fullmatch(r"[1-9][0-9]{0,2}", step):
        return "has an invalid step after '/'"
    if values in ("*", "?"):
        return None
    low, dash, high = values.partition("-")
    ends = [_number(field, end) for end in ((low, high) if dash else (low,))]
    if any(end is None or not field.low <= end <= field.high for end in ends):
        names = f", or {', '.join(field.names)}" if field.names else ""
        return f"must be '*', or values and ranges from {field.low} to {field.high}{names}"
    if dash and ends[0] > ends[1]:  # type: ignore[operator]
        return "is a range that ends before it begins"
    return None


def _number(field: CronField, text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else field.names.get(text.lower())


def interval_seconds(text: str) -> int:
    """Return the seconds of an interval such as ``90m``, ``6h`` or ``1d``.

    Raises
    ------
    ExperimentError
        If it is not a positive number with a unit.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text.strip())
    if found is None:
        raise ExperimentError(
            f"{argument('every')} must be a number and a unit, such as 90m, 6h or 1d (got {text!r}).",
            key="every",
            found=text,
        )
    return int(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Timing:
    """Times at which a recurring run starts.

    Attributes
    ----------
    cron
        Cron expression with six fields; None to use ``every_s``.
    every_s
        Interval in seconds.
    at_once
        Runs of it that may be in progress at the same time, 1 to 10; further ones wait.
    catch_up
        Start also the runs that were missed, for example while it was paused.
    """

    cron: str | None
    every_s: int | None
    at_once: int = 1
    catch_up: bool = False

    def __str__(self) -> str:
        """Return the cron expression, or the interval."""
        return f"every {self.every_s} s" if self.cron is None else f"cron {self.cron}"

    @classmethod
    def of(cls, cron: str | None, every: str | None, *, at_once: int | None, catch_up: bool) -> Timing | None:
        """Return the timing given by a cron expression or an interval; None without either.

        Raises
        ------
        ExperimentError
            If both are given, one is invalid, or the other arguments are given without one.
        """
        if cron is None and every is None:
            if at_once is not None or catch_up:
                given = "catch_up" if at_once is None else "max_concurrency"
                needed = f"{argument('cron')} or {argument('every')}"
                raise ExperimentError(f"{argument(given)} needs {needed}.", key=given)
            return None
        if cron is not None and every is not None:
            raise ExperimentError(f"Give either {argument('cron')} or {argument('every')}.", key="cron")
        return cls(
            None if cron is None else cron_with_seconds(cron),
            None if every is None else interval_seconds(every),
            at_once or 1,
            catch_up,
        )


class RecurringRun(NamedTuple):
    """Recurring run of the installation.

    Attributes
    ----------
    run
        Its id.
    state
        ``active`` or ``paused``.
    when
        Its cron expression, or its interval.
    """

    run: str
    name: str
    state: str
    when: str


def schedule_pipeline(kubeflow: Kubeflow, order: Order, timing: Timing, say: Say) -> Started:
    """Upload a pipeline's version if it does not exist, and create a recurring run of it.

    If anything fails or is interrupted, everything created is removed again.

    Raises
    ------
    FedloomError
        If the pipeline cannot be compiled, or Kubeflow rejects a request or fails.
    InterruptedRun
        On Ctrl-C.
    """
    models = kubeflow.models
    if timing.cron is not None:
        trigger = models.V2beta1Trigger(cron_schedule=models.V2beta1CronSchedule(cron=timing.cron))
    else:
        # The generated client takes the API's 64-bit integers as text.
        periodic = models.V2beta1PeriodicSchedule(interval_second=str(timing.every_s))
        trigger = models.V2beta1Trigger(periodic_schedule=periodic)
    try:
        with ExitStack() as made:
            found = upload_pipeline(kubeflow, order, made, say)
            mark = submission_mark()
            body = models.V2beta1RecurringRun(
                display_name=order.name,
                description=mark,
                experiment_id=found.experiment,
                pipeline_version_reference=models.V2beta1PipelineVersionReference(found.pipeline, found.version),
                runtime_config=models.V2beta1RuntimeConfig(parameters=dict(order.arguments), pipeline_root=order.root),
                service_account=order.service_account,
                max_concurrency=str(timing.at_once),
                no_catchup=not timing.catch_up,
                mode="ENABLE",
                trigger=trigger,
            )
            on_failure(made, say, lambda: _withdraw(kubeflow, found.experiment, mark))
            run = kubeflow.request(f"create the schedule {order.name}", SERVICE, METHOD.format("create"), body)
            made.pop_all()
    except KeyboardInterrupt as error:
        raise InterruptedRun("interrupted before the schedule was created; everything created was removed") from error
    page = kubeflow.page(run.recurring_run_id, kind="recurringrun")
    return Started(run.recurring_run_id, page, found.pipeline)


def _withdraw(kubeflow: Kubeflow, experiment: str, mark: str) -> None:
    for one in recurring_runs(kubeflow, experiment_id=experiment):
        if one.description == mark:
            delete_schedule(kubeflow, one.recurring_run_id)


def list_schedules(kubeflow: Kubeflow, experiment: str) -> Iterator[RecurringRun]:
    """Yield the recurring runs in a Kubeflow experiment, given its name; none if there is no such experiment.

    Raises
    ------
    FedloomError
        If Kubeflow rejects a request or fails.
    """
    found = kubeflow.experiment(experiment)
    for one in () if found is None else recurring_runs(kubeflow, experiment_id=found):
        state = "active" if one.status == "ENABLED" else "paused"
        yield RecurringRun(one.recurring_run_id, one.display_name, state, _when(one.trigger))


def _when(trigger: Any) -> str:
    if trigger is not None and trigger.cron_schedule is not None:
        return f"cron {trigger.cron_schedule.cron}"
    if trigger is not None and trigger.periodic_schedule is not None:
        return f"every {trigger.periodic_schedule.interval_second} s"
    return "no trigger"


def pause_schedule(kubeflow: Kubeflow, run: str) -> None:
    """Start no more runs of a recurring run; those in progress continue.

    Raises
    ------
    FedloomError
        If there is no such recurring run, or Kubeflow rejects the request or fails.
    """
    kubeflow.request(f"pause the schedule {run}", SERVICE, METHOD.format("disable"), run)


def resume_schedule(kubeflow: Kubeflow, run: str) -> None:
    """Start runs of a paused recurring run again; raises like :func:`pause_schedule`."""
    kubeflow.request(f"resume the schedule {run}", SERVICE, METHOD.format("enable"), run)


def delete_schedule(kubeflow: Kubeflow, run: str) -> None:
    """Delete a recurring run; its past runs remain, and those in progress continue; raises like :func:`pause_schedule`.

    By default Kubernetes would also delete the workflows in progress, which the recurring run owns
    (``backend/src/crd/controller/scheduledworkflow/util/scheduled_workflow.go``, ``SetOwnerReferences``).
    """
    what, method = f"delete the schedule {run}", METHOD.format("delete")
    kubeflow.request(what, SERVICE, method, run, propagation_policy="ORPHAN")
