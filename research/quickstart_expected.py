"""Print what `make run` got beside what is expected of its seed.

    python research/quickstart_expected.py [RUNS]

The figures expected are in quickstart-expected.csv: test accuracy in percent of the clients never seen in training,
after local steps of their own, on an AMD EPYC with AVX-512; and how far other processors may be from them
(docs/results/quickstart.md#on-other-processors).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pages_quickstart import METHODS, measured_too

EXPECTED = Path(__file__).with_name("quickstart-expected.csv")


def rows(runs: Path) -> Iterator[tuple[str, str, str, float, float, float | None]]:
    """Yield seed, method, steps, expected accuracy, tolerance and accuracy, for every run of a seed with expectations.

    The accuracy is None if the run has not measured it.
    """
    with EXPECTED.open(encoding="utf-8", newline="") as file:
        expected = list(csv.DictReader(file))
    for method in METHODS:
        for folder in sorted((runs / method, *(runs / method).glob("seed=*"))):
            if not (folder / "summary.json").is_file():
                continue
            seed = str(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["seed"])
            measured = measured_too(folder)
            for row in expected:
                if (row["seed"], row["method"]) == (seed, method):
                    accuracy = measured.get(f"after_{row['steps']}")
                    yield seed, method, row["steps"], float(row["accuracy"]), float(row["tolerance"]), accuracy


def main() -> None:
    """Print the table of a folder of runs."""
    found = list(rows(Path(sys.argv[1] if sys.argv[1:] else "runs/quickstart")))
    if not found:
        print("No figures are expected for these seeds (research/quickstart-expected.csv).")
        return
    print("\nTest accuracy (%) of the 40 clients never seen in training, after local steps of their own:\n")
    print(f"{'seed':>4}  {'method':<20} {'steps':>5}  {'expected':>13}  {'this run':>8}")
    for seed, method, steps, expected, tolerance, accuracy in found:
        got = "-" if accuracy is None else f"{accuracy:.1f}"
        far = "" if accuracy is None or abs(accuracy - expected) <= tolerance else "  outside the tolerance"
        print(f"{seed:>4}  {METHODS[method]:<20} {steps:>5}  {expected:>7.1f} ± {tolerance:<3.0f}  {got:>8}{far}")
    print(
        "\nExpected: measured on an AMD EPYC with AVX-512, torch 2.15. Another processor or torch gives other figures, "
        "within the\ntolerance wherever that was tried (docs/results/quickstart.md#on-other-processors)."
    )


if __name__ == "__main__":
    main()
