"""FedLoom: personalized federated learning on one machine, on Kubernetes, under Kubeflow.

``run`` runs an experiment and returns it as a :class:`Run`; ``sweep`` runs many, ``load`` opens one that was run,
``compare`` puts some side by side, ``personalize`` gets a model for a client that a run does not know, and ``fetch``
fetches a data set (docs/python.md).
Nothing heavy is imported before it is used.
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

# PyTorch reads this when it allocates first: tensors of 2 MiB and more in huge pages, with far fewer page faults.
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
"""Where the names are that are imported when they are used first."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def personalize(where: str, x: Any = None, y: Any = None, **how: Any) -> PersonalModel:
    """Get a model for a client that took no part in a run, from its server or its folder (docs/serving.md).

    Parameters
    ----------
    where
        ``HOST:PORT`` of `fedloom serve` or of an aggregator; a run's folder; or the URL where a run is published.
    x, y
        Examples ``[n, *input_shape]`` and labels ``[n]``, raw: pixels from 0 to 255, features and tokens as they are;
        labels as names of the run's classes, or as their positions from 0 (integers are names where the classes are
        integers). Without ``y`` where the method needs no labels.
    how
        Keyword arguments, as follows.
    data
        Instead of ``x`` and ``y``, a folder that `fedloom data pack` made.
    client
        The client's id, which seeds its random numbers: the same data and id give the same model.
    checkpoint
        ``last``, a round, or, from a run, ``best``.
    predictor
        ``personal``, or another predictor of the method.
    precision
        ``float32``, or ``bfloat16``, which is rounded and half as large.
    epsilon, delta, clip
        (ε, δ)-differential privacy of what is told of the data, with each example's embedding shortened to norm C
        (docs/serving.md); without ``epsilon`` as the run was trained.
    ledger, budget
        A file that counts what requests have spent of the data's privacy, and the largest ε that they may come to
        together; one that would exceed it is refused before anything is told.
    tls_ca, tls_certificate, tls_key, token_file, token, insecure
        Credentials for a server; by default those of the environment (docs/security.md).
    timeout_s
        Seconds within which a server must answer; a busy server is asked again until then.

    Returns
    -------
    PersonalModel
        A PyTorch module: raw inputs in, probabilities out.

    Raises
    ------
    DataError
        If the data are of another kind than the run's, or there is no such run or round.
    ExperimentError
        If an argument is not allowed.
    RefusedError
        If the server refuses the credentials.
    QuorumError
        If no model came in time.

    Examples
    --------
    ::

        model = fedloom.personalize("models.example.org:7733", x, y, tls_ca="ca.pem", token_file="token")
        model(x).argmax(1)
    """
    from fedloom.runner.personal import asked_for, personal_model

    return personal_model(where, *asked_for(where, x, y, **how))


async def personalize_async(where: str, x: Any = None, y: Any = None, **how: Any) -> PersonalModel:
    """As :func:`personalize`, as a coroutine."""
    from fedloom.runner.personal import asked_for, personal_model_async

    return await personal_model_async(where, *asked_for(where, x, y, **how))
