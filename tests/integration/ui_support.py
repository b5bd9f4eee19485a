"""Runs to show, and the page served over a real socket."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from run_processes import WAIT_S, fedloom
from vowel_data import vowel_experiment

from fedloom.security.access import Access
from fedloom.transport.http_server import HttpLimits, http_served
from fedloom.ui.pages import LiveFederation, Site
from fedloom.ui.server import application

ROUNDS = 8


def trained(folder: Path) -> Path:
    """Train two methods on the same clients, and one with differential privacy; return the folder of runs."""
    federation = {"rounds": ROUNDS, "clients_per_round": 3}
    tree = vowel_experiment(
        folder, algorithm={"name": "fedavg", "local": {"steps": 2}}, federation=federation, evaluation={"every": 2}
    )
    tree["data"]["validation_fraction"] = 0.2
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree))
    private = (
        "algorithm.weighting=uniform",
        "federation.privacy={of: clients, clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-3, noise: central}",
    )
    for name, *changes in (("avg",), ("ditto", "algorithm.name=ditto"), ("sub/private", *private)):
        fedloom("run", path, "--out", folder / "runs" / name, *(f"--set={change}" for change in changes))
    return folder / "runs"


def copied(runs: Path, folder: Path) -> Path:
    """Copy a folder of runs, for a test that changes them."""
    return Path(shutil.copytree(runs, folder / "copied"))


class Answer(NamedTuple):
    """Answer to a request."""

    status: int
    text: str
    headers: Mapping[str, str]


def asked(
    port: int, path: str, method: str = "GET", body: str | None = None, host: str | None = None, **headers: str
) -> Answer:
    """Send a request as it is, and return the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Host": host or f"127.0.0.1:{port}", **given})
        response = connection.getresponse()
        text = response.read().decode()
        return Answer(response.status, text, {name.lower(): value for name, value in response.getheaders()})
    finally:
        connection.close()


@contextmanager
def shown(folder: Path, access: Access | None = None, federation: LiveFederation | None = None) -> Iterator[int]:
    """Serve the page about a folder for the duration of the block; yield its port."""
    site = Site(folder, federation)
    site.watch.patience_s = WAIT_S  # no list depends on time
    with http_served("listen", "127.0.0.1:0", application(site, access), HttpLimits(64, 60.0)) as port:
        yield port
