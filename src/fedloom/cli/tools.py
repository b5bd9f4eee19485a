"""``fedloom schema`` and ``fedloom device``: schema of experiment files, and check of a device."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fedloom.cli.results import CommandResult


def schema_command() -> None:
    """Print the JSON schema of experiment files. Editors and other tools use it to complete and check keys."""
    import json

    from fedloom.experiment.editor_schema import editor_schema

    typer.echo(json.dumps(editor_schema(), indent=2, ensure_ascii=False))


def device_command(
    device: Annotated[Literal["cuda", "cpu"], typer.Argument(help="Device to check, as in runtime.device.")] = "cuda",
    clients: Annotated[int, typer.Option(help="Clients that train together.", min=1, metavar="N")] = 16,
) -> CommandResult:
    """Check that a device computes what a CPU computes, and the same bits twice; show its speed and memory."""
    import torch

    from fedloom.cli.tables import print_table
    from fedloom.engine.assemble import use_device
    from fedloom.engine.device import check_device
    from fedloom.errors import ExperimentError

    found = use_device(device, 1)
    name = torch.cuda.get_device_name() if found.type == "cuda" else "CPU"
    rows = check_device(found, clients)
    cells = [
        (
            f"{row.model}, {row.dtype}",
            f"{row.difference:.1e}",
            f"{row.limit:.0e}",
            "yes" if row.repeats else "no",
            f"{row.steps_per_s:.0f}",
            "–" if row.bytes_per_client is None else f"{row.bytes_per_client / 2**20:.1f}",
        )
        for row in rows
    ]
    headings = ("model", "difference", "at most", "same bits twice", "client steps/s", "MiB per client")
    title = f"{name} · torch {torch.__version__} · {clients} clients at once"
    failures = []
    if wrong := [f"{row.model} in {row.dtype}" for row in rows if not row.passes]:
        failure = ExperimentError(
            f"{name} does not compute what a CPU computes, or not the same bits twice: {', '.join(wrong)}",
            hint="use another device, driver or torch; results from this one would be wrong",
            key="runtime.device",
            found=device,
        )
        failures.append(failure)
    facts = {"device": name, "torch": torch.__version__, "clients": clients, "checks": rows}
    return CommandResult(facts, lambda: print_table(title, headings, cells), failures)
