"""Which worker serves which row of a cohort."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def deal(
    clients: Sequence[str], workers: Mapping[str, Collection[str]], loads: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """Deal the rows of a cohort to workers: in order, in equal shares (±1) among those that may serve them.

    A client whose data exists in one place only is served there; what is left evens the shares out. The result
    depends on nothing but the arguments, not on the order in which workers joined.

    Parameters
    ----------
    clients
        Client id of each row; an id may repeat.
    workers
        For each worker the clients it may serve; give sets, membership is asked once per row and worker.
    loads
        Rows that each worker is busy with already (default: none).

    Returns
    -------
    dict
        Worker -> positions in ``clients``, ascending. A row that no worker may serve is in no share.
    """
    names = sorted(workers)
    load = {name: 0 if loads is None else loads.get(name, 0) for name in names}
    shares: dict[str, list[int]] = {name: [] for name in names}

    # Rows alike in who may serve them are dealt together, the least free first.
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
    """Split ``rows`` so that loads end as equal as they can; ties go to the earlier name."""
    shares = [0] * len(names)
    for _ in range(rows if names else 0):
        least = min(range(len(names)), key=lambda i: loads[i] + shares[i])
        shares[least] += 1
    return list(zip(names, shares, strict=True))
