"""Clients of experiments/pefll-cifar10.yaml with pixels from 0 to 255, normalized by constants for pixels from 0 to 1.

    python research/unscaled_pixels.py DIR

An old FL-bench trained FedAvg on such pixels (docs/results/pefll-cifar10.md). DIR is a new folder for the partition.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from page_parts import ROOT

from fedloom.core.processes import command

NORMALIZATION = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}


def main() -> None:
    """Make the partition, and replace its normalization."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python research/unscaled_pixels.py DIR")
    folder = Path(sys.argv[1]).absolute()
    part = folder.with_name(f"{folder.name}.part")
    subprocess.run(command("partition", str(ROOT / "experiments/pefll-cifar10.yaml"), "--out", str(part)), check=True)
    file = part / "partition.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    manifest["normalization"] = {name: [each / 255 for each in values] for name, values in NORMALIZATION.items()}
    file.write_text(json.dumps(manifest), encoding="utf-8")
    part.rename(folder)


if __name__ == "__main__":
    main()
