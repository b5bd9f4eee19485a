"""Tensor files that detect damage: checkpoints and client states.

A safetensors file with one metadata key, ``fedloom`` (safetensors does not preserve the order of several): a JSON
object whose first key, ``sha256``, is the digest of the whole file with 64 zeros in the digest's place. So it covers
names, shapes and metadata as well as values, and equal content gives equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.core.words import parsed_json

_BEFORE = b'{"__metadata__":{"fedloom":"{\\"sha256\\": \\"'
_AT = slice(8 + len(_BEFORE), 8 + len(_BEFORE) + 64)
_ZEROS = b"0" * 64


def encode_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file with dense tensors on the CPU, and ``about``: any JSON object without ``sha256``."""
    text = json.dumps({"sha256": _ZEROS.decode(), **dict(sorted(about.items()))})
    content = safetensors.torch.save(dict(tensors), metadata={"fedloom": text})
    assert content[8 : _AT.start] == _BEFORE and content[_AT] == _ZEROS  # noqa: PT018 - one fact
    return b"".join((content[: _AT.start], _digest(content).encode(), content[_AT.stop :]))


def decode_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file.

    Raise ValueError if its digest is missing or wrong, or the file is not valid.
    """
    if content[8 : _AT.start] != _BEFORE:
        raise ValueError("it has no digest; another version of FedLoom may have written it")
    stored, found = content[_AT].decode("ascii", errors="replace"), _digest(content)
    if stored != found:
        raise ValueError(f"damaged: its sha256 is {found[:12]}, and must be {stored[:12]}")
    try:
        header = parsed_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about: dict[str, Any] = parsed_json(header["__metadata__"]["fedloom"])
        del about["sha256"]
        return safetensors.torch.load(content), about
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"damaged: {error}") from error


def stored_digest(content: bytes) -> str:
    """Return the digest stored in a file that :func:`decode_tensors` has checked."""
    return content[_AT].decode("ascii")


def _digest(content: bytes) -> str:
    """Return the digest of a file, ignoring the stored one."""
    parts = memoryview(content)
    digest = hashlib.sha256(parts[: _AT.start])
    digest.update(_ZEROS)
    digest.update(parts[_AT.stop :])
    return digest.hexdigest()
