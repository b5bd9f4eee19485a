"""FedLoom: personalized federated learning on one machine, on Kubernetes, under Kubeflow.

``run`` runs an experiment and returns it as a :class:`Run`. ``sweep`` runs many. ``load`` opens a finished run,
``compare`` compares several, ``personalize`` gets a model for a client outside the run, and ``fetch`` downloads a
data set (docs/python.md).
Heavy dependencies are imported on first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.api.calls import compare, fetch, load, run, sweep
    from fedloom.api.federated import Federated
    from fedloom.api.run import Comparison, Run, Sweep
    from fedloom.experiment.sections import Data, Evaluation, Experiment, Federation, OwnData, Runtime
    from fedloom.runner.personal_model import PersonalModel

# PyTorch reads this at its first allocation: tensors of 2 MiB and more go into huge pages, with far fewer page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Data",
    "Evaluation",
    "Experiment",
    "Federated",
    "Federation",
    "OwnData",
    "PersonalModel",
    "Run",
    "Runtime",
    "Sweep",
    "compare",
    "fetch",
    "load",
    "personalize",
    "personalize_async",
    "run",
    "sweep",
]

_LATER = {
    **dict.fromkeys(("compare", "fetch", "load", "run", "sweep"), "fedloom.api.calls"),
    **dict.fromkeys(("Comparison", "Run", "Sweep"), "fedloom.api.run"),
    **dict.fromkeys(
        ("Data", "Evaluation", "Experiment", "Federation", "OwnData", "Runtime"), "fedloom.experiment.sections"
    ),
    "Federated": "fedloom.api.federated",
    "PersonalModel": "fedloom.runner.personal_model",
}
"""Public names that are imported on first use -> their module."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def personalize(where: str, x: Any = None, y: Any = None, **how: Any) -> PersonalModel:
    """Get a model for a client that took no part in a run, from the run's server or folder (docs/serving.md).

    Parameters
    ----------
    where
        Address ``HOST:PORT`` of `fedloom serve` or of an aggregator, a run's folder, or the URL of a published run.
    x, y
        Raw examples ``[n, *input_shape]`` and labels ``[n]``: pixels from 0 to 255, features and tokens unchanged.
        Labels are names of the run's classes, or class positions from 0 (integers are names where the classes are
        integers). Omit ``y`` where the method needs no labels.
    how
        Keyword arguments, as follows.
    data
        Folder made by `fedloom data pack`, instead of ``x`` and ``y``.
    client
        Client id, which seeds the random numbers: the same data and id give the same model.
    checkpoint
        ``last``, a round, or, from a run, ``best``.
    predictor
        ``personal``, or another predictor of the method.
    precision
        ``float32``, or ``bfloat16``, which is rounded and half as large.
    epsilon, delta, clip
        (ε, δ)-differential privacy of what is disclosed of the data, with each example's embedding clipped to
        norm C (docs/serving.md). Without ``epsilon``, the run's training setting applies.
    ledger, budget
        File that records the privacy spent, and the largest total ε allowed. A request that would exceed
        the budget is refused before anything is disclosed.
    tls_ca, tls_certificate, tls_key, token_file, token, insecure
        Credentials for a server; defaults come from the environment (docs/security.md).
    timeout_s
        Seconds to wait for a server's answer; a busy server is retried until then.
    Returns
    -------
    PersonalModel
        PyTorch module: raw inputs in, probabilities out.

    Raises
    ------
    DataError
        If the data do not match the run's kind, or the run or round does not exist.
    ExperimentError
        If an argument is not allowed.
    RefusedError
        If the server refuses the credentials.
    QuorumError
        If no model arrives in time.

    Examples
    --------
    ::

        model = fedloom.personalize("models.example.org:7733", x, y, tls_ca="ca.pem", token_file="token")
        model(x).argmax(1)
    """
    from fedloom.runner.personal import asked_for, personal_model

    return personal_model(where, *asked_for(where, x, y, **how))


async def personalize_async(where: str, x: Any = None, y: Any = None, **how: Any) -> PersonalModel:
    """Get a model as :func:`personalize` does, as a coroutine."""
    from fedloom.runner.personal import asked_for, personal_model_async

    return await personal_model_async(where, *asked_for(where, x, y, **how))
