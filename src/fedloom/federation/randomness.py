"""Random generators of a run, each keyed by its purpose. There is no global generator."""

from __future__ import annotations

from hashlib import blake2b

import torch


def generator(seed: int, purpose: str, client: str = "", round: int = 0, attempt: int = 0) -> torch.Generator:
    """Return the CPU generator for one purpose.

    The key is hashed, so that neighbouring seeds, clients and rounds are unrelated, and the numbers do not depend on
    order of arrival, process or device.
    """
    # Length prefixes make the text unique for each key.
    key = "".join(f"{len(part)}:{part}" for part in (str(seed), purpose, client, str(round), str(attempt)))
    digest = blake2b(key.encode(), digest_size=8, person=b"fedloom").digest()
    random = torch.Generator()
    random.manual_seed(int.from_bytes(digest, "little") >> 1)
    return random
