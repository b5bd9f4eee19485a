"""Catalogue of methods: for each its paper, its requirements, and what protects its clients."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from fedloom.algorithms.base import Algorithm, available, find_algorithm
from fedloom.core.words import first_sentence

PROTECTIONS = {
    "secure sums": "sums_suffice",
    "privacy of clients": "noisy_sums_suffice",
    "privacy of examples": "example_privacy",
}
"""Methods of :class:`~fedloom.algorithms.base.Algorithm` that return why a protection is impossible, by its name."""


@dataclass(frozen=True)
class MethodEntry:
    """Entry of a method with default settings.

    Attributes
    ----------
    name, version
        Name in experiment files, and version of what it computes.
    summary
        Description in a sentence.
    arxiv
        Number of its paper, or of the paper whose variant it is; None if its module names none.
    tasks
        Tasks that it supports; ``restriction`` is the reason if it does not support all.
    needs
        Requirements on the clients' model.
    without
        Reason why a protection is impossible, by protection; the others are possible.
    """

    name: str
    version: int
    summary: str
    arxiv: str | None
    tasks: tuple[str, ...]
    restriction: str
    needs: tuple[str, ...]
    without: dict[str, str]


def method_entries() -> list[MethodEntry]:
    """Return the entries of all installed methods, sorted by name."""
    return [_entry(find_algorithm(name)) for name in available()]


def model_needs(method: Algorithm) -> tuple[str, ...]:
    """Return what a method needs of the clients' model, and a head where it shares a part."""
    needs = tuple(need for need in method.needs if need != "labels")
    return needs if getattr(method, "shared", "all") == "all" or "head" in needs else ("head", *needs)


def impossible_protections(method: Algorithm) -> dict[str, str]:
    """Return why protections are impossible with a method's default settings, by protection."""
    settings = method.settings()
    reasons = {name: getattr(method, rule)(settings) for name, rule in PROTECTIONS.items()}
    if reasons["secure sums"]:  # noise of clients is added to a sum
        reasons["privacy of clients"] = reasons["secure sums"]
    return {name: reason for name, reason in reasons.items() if reason}


def _entry(method: Algorithm) -> MethodEntry:
    kind = type(method)
    paper = re.search(r"arXiv (\d{4}\.\d{4,5})", sys.modules[kind.__module__].__doc__ or "")
    return MethodEntry(
        name=method.name,
        version=method.version,
        summary=first_sentence(kind.__doc__ or method.name),
        arxiv=None if paper is None else paper[1],
        tasks=method.tasks,
        restriction=method.restriction,
        needs=model_needs(method),
        without=impossible_protections(method),
    )
