"""FedLoom: personalized federated learning on one machine, on Kubernetes, under Kubeflow.

``run`` runs an experiment and returns it as a :class:`Run`. ``sweep`` runs many, and ``search`` finds settings that are
best on validation data. ``load`` opens a finished run, ``compare`` compares several, ``audit`` attacks one,
``privacy_cost`` computes the privacy cost of a training, ``personalize`` gets a model for a client outside the run,
and ``fetch`` downloads a data set (docs/python.md). Heavy dependencies are imported on first use.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.api.audits import audit
    from fedloom.api.calls import compare, fetch, load, personalize, personalize_async, privacy_cost, run, sweep
    from fedloom.api.federated import Federated
    from fedloom.api.run import Comparison, Run, Sweep
    from fedloom.api.searches import Search, search
    from fedloom.experiment.sections import Data, Evaluation, Experiment, Federation, OwnData, Runtime
    from fedloom.serving.personal_model import PersonalModel

if sys.platform == "win32":
    raise ImportError("FedLoom runs on Linux and macOS. On Windows, install it in WSL 2 (docs/install.md).")

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
    "Search",
    "Sweep",
    "audit",
    "compare",
    "fetch",
    "load",
    "personalize",
    "personalize_async",
    "privacy_cost",
    "run",
    "search",
    "sweep",
]

_LATER = {
    **dict.fromkeys(
        ("compare", "fetch", "load", "personalize", "personalize_async", "privacy_cost", "run", "sweep"),
        "fedloom.api.calls",
    ),
    **dict.fromkeys(("Comparison", "Run", "Sweep"), "fedloom.api.run"),
    **dict.fromkeys(("Search", "search"), "fedloom.api.searches"),
    **dict.fromkeys(
        ("Data", "Evaluation", "Experiment", "Federation", "OwnData", "Runtime"), "fedloom.experiment.sections"
    ),
    "Federated": "fedloom.api.federated",
    "audit": "fedloom.api.audits",
    "PersonalModel": "fedloom.serving.personal_model",
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
