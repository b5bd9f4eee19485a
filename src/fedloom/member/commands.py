"""``fedloom member``: what a member has approved and spent, and its decisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli.options import Commands
from fedloom.cli.results import CommandResult

if TYPE_CHECKING:
    from fedloom.member.approvals import KnownExperiment
    from fedloom.member.policy import PolicyFile

app = Commands(
    help="Policy of a member: experiments that wait, approvals, and what has been spent.",
)

PolicyPath = Annotated[
    Path | None, typer.Option("--policy", help="The policy.", metavar="FILE", envvar="FEDLOOM_POLICY")
]
States = Annotated[
    str | None, typer.Option(help="The worker's --states, unless the policy has a folder.", metavar="DIR")
]
Digest = Annotated[
    str | None,
    typer.Argument(help="Beginning of the experiment's digest; by default the only one that waits.", metavar="DIGEST"),
]


@app.command("show")
def show_command(
    digest: Annotated[
        str | None, typer.Argument(help="Beginning of a digest: only this experiment.", metavar="DIGEST")
    ] = None,
    policy: PolicyPath = None,
    states: States = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="Show the digests of code of methods that are not FedLoom's.")
    ] = False,
) -> CommandResult:
    """Show experiments with the keys that differ from the last approved one, and what today's traffic and ε are."""
    from fedloom.member.approvals import Approvals, shown

    if methods:
        return _foreign_methods()
    folder, file = _folder(policy, states)
    approvals = Approvals(folder)
    known = [each for each in approvals.known() if each.digest.startswith(digest or "")]
    changes = {
        each.digest: [
            (key, shown(old), shown(new)) for key, old, new in approvals.changes(each.experiment, each.digest)
        ]
        for each in known
    }
    today, epsilons = _spent(folder, file)
    experiments = [
        _facts(each) | {"changes": [{"key": k, "before": old, "after": new} for k, old, new in changes[each.digest]]}
        for each in known
    ]
    lines = []
    for each in known:
        lines.append(_described(each))
        if each.state == "waiting" or digest is not None:
            lines += [f"  {key}: {old} -> {new}" for key, old, new in changes[each.digest]]
    lines += [] if known else ["no experiment has been asked for"]
    lines += [] if today is None else [f"bytes today: {today:,}"]
    lines += [f"client {id_}: ε = {epsilon} in all, for replacing one example" for id_, epsilon in epsilons.items()]
    return CommandResult({"experiments": experiments, "bytes_today": today, "epsilon": epsilons}, "\n".join(lines))


@app.command("approve")
def approve_command(digest: Digest = None, policy: PolicyPath = None, states: States = None) -> CommandResult:
    """Let an experiment run; a worker that waits for it notices within seconds."""
    return _decide(digest, policy, states, "approved")


@app.command("refuse")
def refuse_command(digest: Digest = None, policy: PolicyPath = None, states: States = None) -> CommandResult:
    """Refuse an experiment, or end one that runs; the worker notices within seconds."""
    return _decide(digest, policy, states, "refused")


@app.command("schema")
def policy_schema_command() -> None:
    """Print the JSON schema of policies."""
    import json

    from fedloom.member.policy import Policy

    schema = Policy.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    typer.echo(json.dumps(schema, indent=2, ensure_ascii=False))


def _decide(
    digest: str | None, policy: Path | None, states: str | None, state: Literal["approved", "refused"]
) -> CommandResult:
    from fedloom.member.approvals import Approvals

    folder, _ = _folder(policy, states)
    decided = Approvals(folder).decide(digest, state)
    return CommandResult(_facts(decided), _described(decided))


def _folder(policy: Path | None, states: str | None) -> tuple[Path, PolicyFile | None]:
    """Return the member's folder, and its policy if one is given; raise ExperimentError if there is no folder."""
    from fedloom.core.home import expanded
    from fedloom.errors import ExperimentError
    from fedloom.member.policy import load_policy

    file = None if policy is None else load_policy(policy)
    folder = (None if states is None else expanded(states)) if file is None else file.folder(states)
    if folder is None:
        raise ExperimentError("Give --policy FILE with a folder, or --states DIR.", key="policy")
    return folder, file


def _facts(known: KnownExperiment) -> dict[str, Any]:
    return {"digest": known.digest, "state": known.state, "since": known.since, "aggregator": known.aggregator}


def _described(known: KnownExperiment) -> str:
    from datetime import datetime

    when = datetime.fromtimestamp(known.since).isoformat(" ", "seconds")
    name, method = known.experiment.get("name"), (known.experiment.get("algorithm") or {}).get("name")
    return f"{known.digest} {known.state} since {when}: {name}, {method}, from {known.aggregator}"


def _spent(folder: Path, file: PolicyFile | None) -> tuple[int | None, dict[str, str]]:
    """Return today's bytes, and the total ε of each client at the policy's δ."""
    from fedloom.core.words import rounded_up
    from fedloom.member.usage import RECORD, Usage
    from fedloom.privacy.spent import Spent

    if not (folder / RECORD).exists():
        return None, {}
    usage = Usage(folder, writes=False)
    if file is None or (privacy := file.policy.privacy) is None:
        return usage.today, {}
    totals = {client: Spent((), tuple(usage.costs(client).values())).total(privacy.delta) for client in usage.clients()}
    return usage.today, {client: rounded_up(total.epsilon) for client, total in totals.items()}


def _foreign_methods() -> CommandResult:
    from fedloom.algorithms.base import available, find_algorithm
    from fedloom.member.policy import code_digest

    found = {name: code_digest(type(find_algorithm(name))) for name in available()}
    foreign = {name: digest for name, digest in found.items() if digest is not None}
    lines = [f"{name}: {digest}" for name, digest in foreign.items()]
    return CommandResult(foreign, "\n".join(lines) or "all methods are FedLoom's own")
