"""Network addresses, as given to ``--listen`` and ``--aggregator``."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

from fedloom.errors import ExperimentError

HIGHEST_PORT = 65535


def split_address(text: str, *, what: str, lowest: int) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 address is in brackets and keeps them.

    gRPC wraps a port above 65535 to another one, and accepts a name without a port.

    Parameters
    ----------
    what
        Name of the address in errors.
    lowest
        Lowest port allowed: 0 (any free port) makes sense only for an address to serve on.

    Raises
    ------
    ExperimentError
        If the text is not such an address.
    """
    match = re.fullmatch(r"([^\s:/\[\]]+|\[(?P<v6>[^\s/\[\]]+)\]):(?P<port>[0-9]{1,5})", text, re.ASCII)
    if match is None or not lowest <= int(match["port"]) <= HIGHEST_PORT or not _is_v6(match["v6"]):
        raise ExperimentError(
            f"{what} must be HOST:PORT with a port from {lowest} to {HIGHEST_PORT} and an IPv6 address in brackets "
            f"(got {text})",
            found=text,
        )
    return match[1], int(match["port"])


def dialable(address: str) -> str:
    """Return a bound address as peers dial it: a wildcard address becomes HOST."""
    host, port = split_address(address, what="the address", lowest=0)
    try:
        everywhere = ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return f"HOST:{port}" if everywhere else address


def _is_v6(text: str | None) -> bool:
    """Return whether the text in brackets is an IPv6 address; True for None (no brackets)."""
    try:
        return text is None or bool(IPv6Address(text))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is reachable only from this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
