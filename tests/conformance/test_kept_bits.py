"""The bits of a tiny run of every method are those of before (docs/design.md, §4).

They are kept in kept_bits.json for one machine; on another the bits may be others, and these tests are skipped.

    pytest tests/conformance/test_kept_bits.py --keep-bits -n 0

writes them anew, for the machine that it runs on.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from conformance_kit import Federation

from fedloom.federation import tensor_file
from fedloom.runner.assemble import fingerprint

KEPT = Path(__file__).parent / "kept_bits.json"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_the_bits_are_those_of_before(tiny: Federation, method: str, request: pytest.FixtureRequest) -> None:
    """Of the tensors of the last checkpoint, and of what was measured, in which the predictors of all clients are."""
    if request.config.getoption("--algorithm", default=None) is not None:
        pytest.skip("bits are kept for the methods and settings of the kit")
    here = fingerprint(tiny.parts.experiment)
    machine: dict[str, Any] = {name: value for name, value in here.items() if name not in ("fedloom", "python")}
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": None, "bits": {}}
    write = request.config.getoption("--keep-bits", default=False)
    if kept["machine"] != machine and not write:
        pytest.skip(f"bits are kept for {kept['machine']}, this is {machine}")
    tiny.run("run")
    measured = json.dumps(tiny.metrics("run"), sort_keys=True).encode()
    state, _ = tensor_file.decode(tiny.final("run"))  # what its file looks like may change
    found = {"state": sha256(safetensors.torch.save(state)), "metrics": sha256(measured)}
    if write:
        before = kept["bits"] if kept["machine"] == machine else {}
        bits = dict(sorted({**before, method: found}.items()))
        KEPT.write_text(json.dumps({"machine": machine, "bits": bits}, indent=2) + "\n")
        return
    assert method in kept["bits"], f"no bits are kept for {method}: pytest {__file__} --keep-bits -n 0"
    assert found == kept["bits"][method]
