"""Check that a tiny run of every method, three rounds each, gives the recorded bits (docs/design.md, §4).

The bits are recorded in kept_bits.json for one machine; others may compute other bits, and these tests are skipped.

pytest tests/conformance/test_kept_bits.py --keep-bits

records them again on the present machine; same_bits.py does so in two checkouts and compares them.

The version of each method stands beside its bits. Members of two releases are in one federation if that version is the
same, so bits may change only with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_kit import Federation
from torch import Tensor

from fedloom.core.processes import processor
from fedloom.engine.assemble import fingerprint
from fedloom.experiment import load_experiment
from fedloom.runs.checkpoint import decode_tensors

KEPT = Path(__file__).parent / "kept_bits.json"


def digest(parts: Iterator[str]) -> str:
    """Hash parts regardless of their order, and so of names: a renamed tensor or key keeps its bits."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def tensors(state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield type, shape and content of each tensor."""
    for tensor in state.values():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def numbers(measured: Any) -> Iterator[str]:
    """Yield every number in nested lists and mappings, in full precision, without derived values."""
    if isinstance(measured, dict | list):
        for value in kept(measured) if isinstance(measured, dict) else measured:
            yield from numbers(value)
    elif isinstance(measured, int | float):
        yield repr(measured)


def kept(measured: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of a mapping except a task's metrics and the spread, which are newer than the recorded bits."""
    return (value for key, value in measured.items() if key not in ("metrics", "headline", "spread"))


def check_version(method: str, before: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise AssertionError if the bits of a method have changed without its version."""
    assert found == before or found["version"] > before["version"], (
        f"the results of {method} have changed, and its version is {found['version']} as before. If they must change, "
        f"set `version` of its Algorithm to {before['version'] + 1}, so that releases that differ in them are not "
        f"mixed in one federation, and record the new bits: pytest {__file__} --keep-bits"
    )


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads /proc/cpuinfo")
def test_the_processor_is_named_by_vendor_and_model() -> None:
    """Two processors with AVX-512 compute different bits, because numeric libraries choose kernels by the model."""
    named = fingerprint(load_experiment(Path(__file__).parents[2] / "experiments" / "quickstart.yaml"))["processor"]
    assert named == processor() != ""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    assert {line.split(": ")[1] for line in lines if line.startswith(("vendor_id", "model\t", "CPU part"))} <= {
        *processor().split()
    }


def test_changed_bits_need_another_version() -> None:
    kept = {"version": 1, "state": "a", "metrics": "b"}
    check_version("m", kept, dict(kept))
    check_version("m", kept, {"version": 2, "state": "c", "metrics": "b"})
    for changed in ({"state": "c"}, {"metrics": "c"}, {"state": "c", "version": 0}):
        with pytest.raises(AssertionError, match="version` of its Algorithm to 2"):
            check_version("m", kept, kept | changed)


def test_results_equal_the_recorded_bits(tiny: Federation, method: str, request: pytest.FixtureRequest) -> None:
    """Compare the tensors of the last checkpoint and the evaluations, which depend on every client's predictors."""
    if request.config.getoption("--algorithm", default=None) is not None:
        pytest.skip("bits are kept for the methods and settings of the kit")
    here = fingerprint(tiny.parts.experiment)
    machine: dict[str, Any] = {name: value for name, value in here.items() if name not in ("fedloom", "python")}
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": None, "bits": {}}
    write = request.config.getoption("--keep-bits", default=False)
    if kept["machine"] != machine and not write:
        pytest.skip(f"bits are kept for {kept['machine']}, this is {machine}")
    tiny.recorded("run")
    state, _ = decode_tensors(tiny.final("run"))  # the file format may change
    version = tiny.parts.algorithm.version
    found = {"version": version, "state": digest(tensors(state)), "metrics": digest(numbers(tiny.metrics("run")))}
    before = kept["bits"] if kept["machine"] == machine else {}
    check_version(method, before.get(method, found), found)
    if write:
        bits = dict(sorted({**before, method: found}.items()))
        KEPT.write_text(json.dumps({"machine": machine, "bits": bits}, indent=2) + "\n")
        return
    assert method in kept["bits"], f"no bits are kept for {method}: pytest {__file__} --keep-bits"
    assert found == kept["bits"][method], f"{method} has a new version: record its bits with --keep-bits"
