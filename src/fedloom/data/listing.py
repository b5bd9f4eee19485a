"""Files below a folder of examples: links are followed, and files that operating systems leave behind are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fedloom.errors import DataError

LEFT_BEHIND = frozenset(
    {
        "thumbs.db",
        "ehthumbs.db",
        "ehthumbs_vista.db",
        "desktop.ini",
        "$recycle.bin",
        "system volume information",
        "__macosx",
        "icon\r",
        "@eadir",
        "#recycle",
        "lost+found",
    }
)
"""Names, in lower case, of files and folders that Windows, macOS and network drives add to a user's own."""

MOST_FOLDERS = 1_000_000
"""Maximum number of folders to walk: a few folders linked to each other can make an unbounded number of paths."""


def is_passed_over(name: str) -> bool:
    """Return True if a name is hidden or one that an operating system leaves behind."""
    return name.startswith(".") or name.lower() in LEFT_BEHIND


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder in a deterministic order: the files of each folder before its subfolders.

    Links to folders are followed. Hidden files and those of :data:`LEFT_BEHIND` are skipped.

    Raise DataError if a folder cannot be read, a link leads to a folder above it, or there are more than
    :data:`MOST_FOLDERS` folders.
    """
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    walked = 0
    while waiting:
        at, above = waiting.pop()
        walked += 1
        if walked > MOST_FOLDERS:
            raise DataError(
                f"{folder} has more than {MOST_FOLDERS:,} folders, counting those that links lead to; remove the "
                "links between its folders"
            )
        files, folders, here = _entries(at)
        if here in above:
            raise DataError(f"{at} is a link to a parent folder, which forms a cycle; remove the link")
        yield from (at / name for name in files)
        waiting += [(at / name, above | {here}) for name in reversed(folders)]


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the folders directly in a folder; raises and skips like :func:`files_below`."""
    return _entries(folder)[1]


def _entries(folder: Path) -> tuple[list[str], list[str], tuple[int, int]]:
    """Return the sorted names of files and of folders, and the (device, inode) pair that identifies this folder."""
    files: list[str] = []
    folders: list[str] = []
    try:
        about = folder.stat()
        with os.scandir(folder) as found:
            for entry in found:
                if not is_passed_over(entry.name):
                    (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({(error.strerror or str(error)).lower()}); change its permissions, or move it "
            "elsewhere"
        ) from error
    return sorted(files), sorted(folders), (about.st_dev, about.st_ino)
