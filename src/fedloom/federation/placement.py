"""Placement of a cohort's rows on workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def deal(
    clients: Sequence[str], workers: Mapping[str, Collection[str]], loads: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """Assign the rows of a cohort to workers: in order, in equal shares (±1) among the workers that may serve them.

    A client whose data exist in only one place is served there; the other rows even out the shares. The result depends
    only on the arguments, not on the order in which workers joined.

    ``workers`` maps each worker to the clients that it may serve (sets, because membership is tested once per row and
    worker), and ``loads`` to the rows that it is busy with. The result maps workers to positions in ``clients``,
    ascending; a row that no worker may serve is in no share.
    """
    names = sorted(workers)
    load = {name: 0 if loads is None else loads.get(name, 0) for name in names}
    shares: dict[str, list[int]] = {name: [] for name in names}

    # Deal rows with the same candidates together, those with the fewest candidates first.
    alike: dict[tuple[str, ...], list[int]] = {}
    for row, client in enumerate(clients):
        alike.setdefault(tuple(name for name in names if client in workers[name]), []).append(row)
    for candidates, group in sorted(alike.items(), key=lambda item: (len(item[0]), item[1][0])):
        start = 0
        for name, share in _even_out([load[name] for name in candidates], candidates, len(group)):
            shares[name] += group[start : start + share]
            load[name] += share
            start += share
    return {name: sorted(share) for name, share in shares.items() if share}


def _even_out(loads: Sequence[int], names: Sequence[str], rows: int) -> list[tuple[str, int]]:
    """Split ``rows`` so that the final loads are as equal as possible; ties go to the earlier name."""
    shares = [0] * len(names)
    for _ in range(rows if names else 0):
        least = min(range(len(names)), key=lambda i: loads[i] + shares[i])
        shares[least] += 1
    return list(zip(names, shares, strict=True))
