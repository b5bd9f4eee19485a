"""Every random choice of a run, from a generator keyed with what it is for. There is no global generator."""

from __future__ import annotations

from hashlib import blake2b

import torch


def generator(seed: int, purpose: str, client: str = "", round: int = 0, attempt: int = 0) -> torch.Generator:
    """Return the CPU generator of one purpose.

    The key is hashed, so that neighbouring seeds, clients and rounds have nothing in common, and the numbers depend
    on no order of arrival, process or device.
    """
    # Length-prefixed: no two different keys make the same text.
    key = "".join(f"{len(part)}:{part}" for part in (str(seed), purpose, client, str(round), str(attempt)))
    digest = blake2b(key.encode(), digest_size=8, person=b"fedloom").digest()
    made = torch.Generator()
    made.manual_seed(int.from_bytes(digest, "little") >> 1)
    return made
