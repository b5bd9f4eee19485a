"""Fetching a source's files, once and whole, and loading them, checked."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

from fedloom.data.folders import data_root, locked, published, sync, write_durably
from fedloom.data.sources.base import Pool, Progress, Report, Source, Way, WayFailed
from fedloom.data.sources.ways import Copy
from fedloom.errors import DataError

log = logging.getLogger("fedloom.data")


def fetch(
    source: Source,
    root: Path | str | None = None,
    *,
    copy_from: Path | str | None = None,
    on_progress: Report | None = None,
) -> Path:
    """Make sure that a source's official files are on disk, and return their folder.

    What is there and intact stays. Otherwise the source's ways are tried in order: the files of the first that gives
    all of them, with the right checksums, appear at once in ``<root>/datasets/<name>``. Safe to run in several
    processes: one fetches, the others wait for it.

    Parameters
    ----------
    source
        What to fetch.
    root
        Data root; see :func:`~fedloom.data.folders.data_root`.
    copy_from
        A folder of the user's with the files, raw or ``.gz``: then nothing else is tried.
    on_progress
        Is told how far it is.

    Raises
    ------
    DataError
        If no way worked: each is named with why it failed, and what the user can do.
    """
    report = on_progress or (lambda progress: None)
    folder = source.folder(data_root(root))
    ways: Sequence[Way] = source.ways if copy_from is None else (Copy(Path(copy_from)),)
    with locked(folder):
        if folder.exists():
            try:
                contents(source, folder)
                return folder
            except DataError as error:
                log.warning("%s; fetching it again", str(error).splitlines()[0])
        tried = []
        for way in ways:
            try:
                with published(folder) as staging, closing(checked(source, way, report)) as files:
                    for name, content in files:
                        write_durably(staging / name, content)
                    sync(staging)
            except WayFailed as failure:
                log.info("%s: %s failed: %s", source.name, way.title, failure)
                tried.append(f"  - {way.title}: {failure}")
            else:
                log.info("%s: got by %s", source.name, way.title)
                return folder
    raise DataError(
        f"{source.title} could not be had. Tried:\n" + "\n".join(tried),
        hint=(
            f"put {', '.join(file.name for file in source.files)} (raw, or .gz) into a folder DIR and run: "
            f"fedloom data fetch {source.name} --from DIR"
        ),
    )


def checked(source: Source, way: Way, report: Report) -> Generator[tuple[str, bytes], None, None]:
    """Yield the files of a way, each compared with its checksum.

    Raises
    ------
    WayFailed
        If the way fails, or a file is not the official one.
    """
    report(Progress(way.title, 0, None))
    for file, (name, content) in zip(source.files, way.contents([f.name for f in source.files], report), strict=True):
        found = hashlib.sha256(content).hexdigest()
        if found != file.sha256:
            raise WayFailed(
                f"{name} is not the official file: expected {file.size} bytes of sha256 {file.sha256}, "
                f"found {len(content)} bytes of {found}"
            )
        yield name, content


def contents(source: Source, folder: Path) -> dict[str, bytes]:
    """Return a source's files by name, compared with their checksums.

    Raises
    ------
    DataError
        If one is missing or not the official one: what was expected where, and the command that mends it.
    """
    hint = f"fetch it: fedloom data fetch {source.name}"
    found: dict[str, bytes] = {}
    for file in source.files:
        path = folder / file.name
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{source.title} is not here: expected {path} ({file.size} bytes, sha256 {file.sha256})", hint=hint
            ) from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise DataError(
                f"{path} is damaged: expected {file.size} bytes of sha256 {file.sha256}, "
                f"found {len(content)} bytes of {digest}",
                hint=hint,
            )
        found[file.name] = content
    return found


def load(source: Source, root: Path | str | None = None) -> tuple[Pool, Pool]:
    """Return a source's official train and test pool, read from disk and compared with their checksums.

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return source.read(contents(source, source.folder(data_root(root))))
