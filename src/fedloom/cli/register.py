"""``fedloom register``: a run's model in the Kubeflow Model Registry."""

from __future__ import annotations

from typing import Annotated

import typer

from fedloom.cli.options import Checkpoint


def register_command(
    run: Annotated[str, typer.Argument(help="Folder of the finished run, or its URL.", metavar="RUN|URL")],
    registry: Annotated[
        str | None,
        typer.Option(
            help="URL of the model registry; its token is $FEDLOOM_REGISTRY_TOKEN.",
            metavar="URL",
            envvar="FEDLOOM_REGISTRY",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; by default the experiment's.")] = None,
    version: Annotated[
        str | None, typer.Option(help="Name of the version; by default the round and the checkpoint's digest.")
    ] = None,
    checkpoint: Checkpoint = "last",
    uri: Annotated[
        str | None,
        typer.Option(
            help="URI of the run's folder for those who serve it; by default the URL of a published run.",
            metavar="URI",
        ),
    ] = None,
) -> None:
    """Register a run's model in the Kubeflow Model Registry. The same checkpoint is registered once."""
    from fedloom.kubeflow.registration import ModelRegistry, register_run

    api = ModelRegistry(registry)
    entry = register_run(api, run, model=name, version=version, checkpoint=checkpoint, uri=uri)
    done = "registered" if entry.created else "is already registered"
    typer.echo(f"{entry.model} {entry.version} {done}: {api.url}, model {entry.model_id}, version {entry.version_id}")
