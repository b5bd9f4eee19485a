"""Lines that Katib's file collector reads: ``TIME NAME=VALUE``, by round (docs/search.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fedloom.tasks.names import Headline, headline_of, validation_value

KATIB_FILE = "FEDLOOM_KATIB_FILE"
"""Environment variable that names the file."""

METRICS_PATH = "/var/log/katib/metrics.log"
"""Default path of the file: Katib's own."""

EPSILON = "epsilon"
"""Name of the ε of training."""


def objective_name(headline: Headline) -> str:
    """Return the name under which Katib receives the headline metric on validation examples."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"validation_{headline.name}")


def katib_lines(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the validation value in a line of ``metrics.jsonl``, and one for the ε of training so far.

    Values that are unknown or not finite are left out, and so are test results.
    """
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # RFC 3339
    epsilon = (line.get("privacy") or {}).get("epsilon")
    for name, value in ((objective_name(headline_of(line)), validation_value(line)), (EPSILON, epsilon)):
        if value is not None and math.isfinite(value):
            yield f"{time} {name}={float(value)!r}\n"
