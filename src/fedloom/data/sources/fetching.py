"""Atomic fetching of a source's files, and verified loading."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fedloom.data.folders import data_root, locked, naming_owner, published
from fedloom.data.sources.base import Fetcher, FetchFailed, Progress, RawDataset, Report, Source, SourceFile
from fedloom.data.sources.fetchers import Copy
from fedloom.errors import DataError
from fedloom.storage.folder import fill, read_file, sync

log = logging.getLogger("fedloom.data")

RECORD = "SHA256SUMS"
"""File with the checksums of files that a user supplied, in the format of ``sha256sum``."""

MOST_NAMED = 8
"""Maximum files named in an error; those in the middle are omitted."""


def fetch(
    source: Source,
    root: Path | str | None = None,
    *,
    copy_from: Path | str | None = None,
    on_progress: Report | None = None,
) -> Path:
    """Ensure that a source's files are on disk, and return their folder.

    Intact files are kept. Otherwise the source's fetchers are tried in order; the files of the first fetcher that
    supplies all of them, with the right checksums, appear atomically in ``<root>/datasets/<name>``. Several processes
    may call this at once: one fetches, the others wait for it.

    Files from ``copy_from`` always replace existing ones, unless their content is wrong. Files that users create
    themselves (:class:`~fedloom.data.sources.base.OwnFiles`) are parsed before they are stored.

    Parameters
    ----------
    source
        Source to fetch; sources that it needs are fetched first.
    root
        Data root; see :func:`~fedloom.data.folders.data_root`.
    copy_from
        A folder of the user's with the files, raw or ``.gz``; nothing else is tried then.
    on_progress
        Progress callback.

    Raises
    ------
    DataError
        If the source has no files; if no fetcher worked (names each with its failure, and the remedy); or if files that
        the user supplied are wrong.
    """
    report = on_progress or (lambda progress: None)
    if source.synthetic:
        source.read({})
    for needed in source.needs:
        fetch(needed, root, on_progress=on_progress)
    folder = source.folder(data_root(root))
    given = None if copy_from is None else Path(copy_from)
    own = () if given is None or source.own is None else source.own.names(given)
    if given is not None and not own and not source.files:
        raise DataError(f"{source.title} is not in {given}", hint=how_to_fix(source, data_root(root)))
    with locked(folder):
        if given is not None and own:
            _store_own(source, data_root(root), given, own, report)
        elif given is not None or not _intact(source, data_root(root)):
            _store_official(source, data_root(root), source.fetchers if given is None else (Copy(given),), report)
    return folder


def load(source: Source, root: Path | str | None = None) -> RawDataset:
    """Return the content of a source's files, read from disk and verified against their checksums.

    Raises
    ------
    DataError
        If the files are missing or damaged.
    """
    return source.read(Contents(stored(source, data_root(root))))


def checksums(source: Source, root: Path | str | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file that :func:`load` reads, by name, without reading the files.

    For official files they are the source's own, for files that the user supplied those recorded at fetch time; those
    of the sources it needs are included.

    Raises
    ------
    DataError
        If there are no official files, and none of the user's are stored.
    """
    return {name: stored_file.file.sha256 for name, stored_file in stored(source, data_root(root)).items()}


def size(source: Source, root: Path | str | None = None) -> int | None:
    """Return the size on disk of a source's own files in bytes; None unless all of them are there.

    Known sizes are compared, checksums are not: no file is read except the record of a user's files.
    """
    home = data_root(root)
    if source.synthetic or not source.folder(home).is_dir():
        return None
    try:
        files = stored(dataclasses.replace(source, needs=()), home)
    except DataError:
        return None
    total = 0
    for stored_file in files.values():
        if not stored_file.path.is_file():
            return None
        found = stored_file.path.stat().st_size
        if stored_file.file.size not in (None, found):
            return None
        total += found
    return total


@dataclass(frozen=True)
class StoredFile:
    """File of a source, and the path where it is stored."""

    source: Source
    root: Path
    path: Path
    file: SourceFile

    def content(self) -> bytes:
        """Return its content, verified against its checksum.

        Raises
        ------
        DataError
            If the file is missing or damaged; names the expected file, its path, and the command that fixes it.
        """
        hint = how_to_fix(self.source, self.root)
        try:
            with naming_owner(self.path):
                content = read_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{self.source.title} is not here: expected {self.path} ({self.file})", hint=hint) from None
        except OSError as error:
            why = error.strerror or error
            raise DataError(f"{self.path} cannot be read: {why}", hint=hint) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.file.sha256:
            raise DataError(
                f"{self.path} is damaged: expected {self.file}, found {len(content)} bytes of sha256 {digest}",
                hint=hint,
            )
        return content


class Contents(Mapping[str, bytes]):
    """Contents of stored files by name.

    Each file is read and verified on access, so that a data set of many files is never in memory as a whole.
    """

    def __init__(self, files: Mapping[str, StoredFile]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> bytes:
        """Return the content of a file."""
        return self._files[name].content()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._files)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)


def stored(source: Source, root: Path) -> dict[str, StoredFile]:
    """Return the files of a source and of those it needs, by name, without checking that they exist.

    Raises
    ------
    DataError
        If there are no official files, and no record of the user's own.
    """
    if source.synthetic:
        return {}
    folder = source.folder(root)
    record = folder / RECORD
    if source.own is not None and record.exists():
        files = recorded(record, source, root)
    elif source.files:
        files = source.files
    else:
        raise DataError(f"{source.title} is not here: expected {record}", hint=how_to_fix(source, root))
    of_needed = {name: file for needed in source.needs for name, file in stored(needed, root).items()}
    return of_needed | {file.name: StoredFile(source, root, folder / file.name, file) for file in files}


def recorded(record: Path, source: Source, root: Path) -> tuple[SourceFile, ...]:
    """Return the files that a record lists.

    Raises
    ------
    DataError
        If it is not a record, or names a file outside of its folder.
    """
    files = []
    try:
        text = read_file(record).decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{record} cannot be read: {error.strerror or error}", hint=how_to_fix(source, root)) from error
    for line in text.splitlines():
        found = re.fullmatch(r"([0-9a-f]{64})  ((?:[^./][^/]*/)*[^./][^/]*)", line)
        if found is None:
            raise DataError(
                f"{record} is damaged: found the line {line!r}; expected a sha256 and a file name",
                hint=how_to_fix(source, root),
            )
        files.append(SourceFile(found[2], None, found[1]))
    return tuple(files)


FROM = "--from DIR"
"""Option of the fetch command, appended to it."""


def how_to_fix(source: Source, root: Path) -> str:
    """Return the command that puts a source's files where they belong under a data root."""
    if source.at is not None:
        return f"remove {source.at}: it is made again from data.source.path"
    if source.files:
        return f"fetch it: {_fetching(source, root)}"
    assert source.own is not None
    return f"fetch it: {_fetching(source, root)} {FROM}, where DIR holds {source.own.expected}"


def _fetching(source: Source, root: Path) -> str:
    there = "" if root == data_root() else f" --root {shlex.quote(str(root))}"
    return f"fedloom data fetch {source.name}{there}"


def _intact(source: Source, root: Path) -> bool:
    """Return True if a source's files are complete and intact, and log any error."""
    if not source.folder(root).exists():
        return False
    try:
        for file in stored(source, root).values():
            file.content()
    except DataError as error:
        log.warning("%s; fetching it again", str(error).splitlines()[0])
        return False
    return True


def _store_official(source: Source, root: Path, fetchers: Sequence[Fetcher], report: Report) -> None:
    """Store the files of the first fetcher that supplies all of them."""
    if not source.files:
        raise DataError(f"{source.title} has no official files to fetch", hint=how_to_fix(source, root))
    tried = []
    for fetcher in fetchers:
        try:
            with published(source.folder(root)) as staging, closing(_checked(source, fetcher, report)) as files:
                for name, content in files:
                    fill(staging / name, content)
                sync(staging)
        except FetchFailed as failure:
            log.debug("%s: not available from %s: %s", source.name, fetcher.title, failure)
            tried.append(f"  - {fetcher.title}: {failure}")
        else:
            log.info("%s: fetched by %s", source.name, fetcher.title)
            return
    names = [file.name for file in source.files]
    listed = names if len(names) <= MOST_NAMED else [*names[: MOST_NAMED - 2], "...", names[-1]]
    own = "" if source.own is None else f" (or {source.own.expected})"
    raise DataError(
        f"{source.title} could not be had. Tried:\n" + "\n".join(tried),
        hint=(
            f"put {', '.join(listed)} (raw, or .gz){own} into a folder DIR and run: {_fetching(source, root)} {FROM}"
        ),
    )


def _checked(source: Source, fetcher: Fetcher, report: Report) -> Generator[tuple[str, bytes], None, None]:
    """Yield the files of a fetcher, each verified against its checksum.

    Raises
    ------
    FetchFailed
        If the fetcher fails, or a file is not the official one.
    """
    report(Progress(fetcher.title, 0, None))
    for file, (name, content) in zip(
        source.files, fetcher.contents([f.name for f in source.files], report), strict=True
    ):
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise FetchFailed(
                f"{name} is not the official file: expected {file}, found {len(content)} bytes of sha256 {digest}"
            )
        yield name, content


def _store_own(source: Source, root: Path, given: Path, names: Sequence[str], report: Report) -> None:
    """Store files that the user created, with a record of their checksums, if they can be read as the data set.

    Raises
    ------
    DataError
        If a file cannot be read, or its content is wrong; nothing is changed then.
    """
    files = {}
    with published(source.folder(root)) as staging:
        for name in names:
            report(Progress("copying", 0, None))
            try:
                content = read_file(given / name)
            except OSError as error:
                raise DataError(f"{given / name} cannot be read: {error.strerror or error}") from error
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            fill(staging / name, content)
            file = SourceFile(name, len(content), hashlib.sha256(content).hexdigest())
            files[name] = StoredFile(source, root, staging / name, file)
        fill(staging / RECORD, "".join(f"{f.file.sha256}  {name}\n" for name, f in files.items()).encode())
        for inner in {staging / above for name in names for above in Path(name).parents}:
            sync(inner)
        report(Progress("checking what they hold", 0, None))
        source.read(Contents(files))
    log.info("%s: copied from %s", source.name, given)
