"""Atomic fetching of a data set's files, and verified loading."""

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

from fedloom.data.datasets.base import DataFile, Dataset, FetchFailed, FetchProgress, RawDataset, Report
from fedloom.data.datasets.locations import contents_at, location_title
from fedloom.data.folders import data_root, locked, naming_owner, published
from fedloom.errors import DataError
from fedloom.storage.folder import fill, read_file, sync

log = logging.getLogger("fedloom.data")

RECORD = "SHA256SUMS"
"""File with the checksums of files that a user supplied, in the format of ``sha256sum``."""

MOST_NAMED = 8
"""Maximum files named in an error; those in the middle are omitted."""

FROM = "--from DIR"
"""Option of the fetch command, appended to it."""


def fetch_dataset(
    dataset: Dataset,
    root: Path | str | None = None,
    *,
    copy_from: Path | str | None = None,
    on_progress: Report | None = None,
) -> Path:
    """Ensure that a data set's files are on disk, and return their folder.

    Intact files are kept. Otherwise the locations are tried in order; the files of the first that has all of them, with
    the right checksums, appear atomically in ``<root>/datasets/<name>``. Several processes may call this at once: one
    fetches, the others wait for it.

    Files from ``copy_from`` always replace existing ones, unless their content is wrong. Files that users create
    themselves (:class:`~fedloom.data.datasets.base.OwnFiles`) are parsed before they are stored.

    Raise DataError if the data set has no files; if no location has them (names each with the reason, and the remedy);
    or if files that the user supplied are wrong.

    Parameters
    ----------
    dataset
        Data set to fetch; those that it needs are fetched first.
    root
        Data root; see :func:`~fedloom.data.folders.data_root`.
    copy_from
        User's folder with the files, raw or ``.gz``; no location is tried then.
    on_progress
        Progress callback.
    """
    report = on_progress or (lambda progress: None)
    if dataset.synthetic:
        dataset.read({})
    for needed in dataset.needs:
        fetch_dataset(needed, root, on_progress=on_progress)
    home = data_root(root)
    folder = dataset.folder(home)
    given = None if copy_from is None else Path(copy_from)
    own = () if given is None or dataset.own is None else dataset.own.names(given)
    if given is not None and not own and not dataset.files:
        raise DataError(f"{dataset.title} is not in {given}", hint=how_to_fix(dataset, home))
    with locked(folder):
        if given is not None and own:
            _store_own(dataset, home, given, own, report)
        elif given is not None or not _is_intact(dataset, home):
            _store_official(dataset, home, dataset.locations if given is None else (given,), report)
    return folder


def load_dataset(dataset: Dataset, root: Path | str | None = None) -> RawDataset:
    """Return the content of a data set's files, read from disk and verified against their checksums.

    Raise DataError if the files are missing or damaged.
    """
    return dataset.read(_Contents(_stored(dataset, data_root(root))))


def checksums(dataset: Dataset, root: Path | str | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file that :func:`load_dataset` reads, by name, without reading the files.

    Checksums of files that the user supplied were recorded at fetch time.

    Raise DataError if there are no official files, and none of the user's are stored.
    """
    return {name: stored.file.sha256 for name, stored in _stored(dataset, data_root(root)).items()}


def size_on_disk(dataset: Dataset, root: Path | str | None = None) -> int | None:
    """Return the size on disk of a data set's own files in bytes; None unless all of them are there.

    Known sizes are compared, checksums are not: no file is read except the record of a user's files.
    """
    home = data_root(root)
    if dataset.synthetic or not dataset.folder(home).is_dir():
        return None
    total = 0
    try:
        for stored in _stored(dataclasses.replace(dataset, needs=()), home).values():
            size = stored.path.stat().st_size
            if stored.file.size not in (None, size):
                return None
            total += size
    except (DataError, FileNotFoundError):
        return None
    return total


@dataclass(frozen=True)
class _StoredFile:
    """File of a data set, and the path where it is stored."""

    path: Path
    file: DataFile
    title: str
    hint: str

    def content(self) -> bytes:
        """Return its content, verified against its checksum."""
        try:
            with naming_owner(self.path):
                content = read_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{self.title} is missing: {self.path} must exist ({self.file})", hint=self.hint) from None
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}", hint=self.hint) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.file.sha256:
            raise DataError(
                f"{self.path} is damaged: it has {len(content)} bytes of sha256 {digest}; it must have {self.file}",
                hint=self.hint,
            )
        return content


class _Contents(Mapping[str, bytes]):
    """Contents of stored files by name, each read and verified on access: never all of them in memory."""

    def __init__(self, files: Mapping[str, _StoredFile]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> bytes:
        return self._files[name].content()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _stored(dataset: Dataset, root: Path) -> dict[str, _StoredFile]:
    """Return the files of a data set and of those it needs, by name, without checking that they exist."""
    if dataset.synthetic:
        return {}
    folder, hint = dataset.folder(root), how_to_fix(dataset, root)
    if dataset.own is not None and (folder / RECORD).exists():
        files = _recorded(folder / RECORD, hint)
    elif dataset.files:
        files = dataset.files
    else:
        raise DataError(f"{dataset.title} is missing: {folder / RECORD} must exist", hint=hint)
    of_needed = {name: file for needed in dataset.needs for name, file in _stored(needed, root).items()}
    return of_needed | {file.name: _StoredFile(folder / file.name, file, dataset.title, hint) for file in files}


def _recorded(record: Path, hint: str) -> tuple[DataFile, ...]:
    files = []
    try:
        text = read_file(record).decode("utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{record} cannot be read: {error.strerror or error}", hint=hint) from error
    for line in text.splitlines():
        found = re.fullmatch(r"([0-9a-f]{64})  ((?:[^./][^/]*/)*[^./][^/]*)", line)
        if found is None:
            raise DataError(f"{record} is damaged: {line!r} is not a sha256 and a file name", hint=hint)
        files.append(DataFile(found[2], None, found[1]))
    return tuple(files)


def how_to_fix(dataset: Dataset, root: Path) -> str:
    """Return the command that stores a data set's files under a data root."""
    if dataset.at is not None:
        return f"remove {dataset.at} to recreate it from data.source.path"
    if dataset.files:
        return f"fetch it: {_fetch_command(dataset, root)}"
    assert dataset.own is not None
    return f"fetch it: {_fetch_command(dataset, root)} {FROM}, where DIR holds {dataset.own.expected}"


def _fetch_command(dataset: Dataset, root: Path) -> str:
    there = "" if root == data_root() else f" --root {shlex.quote(str(root))}"
    return f"fedloom data fetch {dataset.name}{there}"


def _is_intact(dataset: Dataset, root: Path) -> bool:
    """Return True if a data set's files are complete and intact, and log any error."""
    if not dataset.folder(root).exists():
        return False
    try:
        for stored in _stored(dataset, root).values():
            stored.content()
    except DataError as error:
        log.warning("%s; fetching it again", str(error).splitlines()[0])
        return False
    return True


def _store_official(dataset: Dataset, root: Path, locations: Sequence[str | Path], report: Report) -> None:
    """Store the files of the first location that has all of them."""
    if not dataset.files:
        raise DataError(f"{dataset.title} has no official files to fetch", hint=how_to_fix(dataset, root))
    tried = []
    for location in locations:
        title = location_title(location)
        report(FetchProgress(title, 0, None))
        try:
            with published(dataset.folder(root)) as staging, closing(_checked(dataset, location, report)) as files:
                for name, content in files:
                    fill(staging / name, content)
                sync(staging)
        except FetchFailed as failure:
            log.debug("%s: %s failed: %s", dataset.name, title, failure)
            tried.append(f"  - {title}: {failure}")
        else:
            log.info("fetched %s from %s", dataset.name, title)
            return
    names = [file.name for file in dataset.files]
    listed = names if len(names) <= MOST_NAMED else [*names[: MOST_NAMED - 2], "...", names[-1]]
    own = "" if dataset.own is None else f" (or {dataset.own.expected})"
    command = f"{_fetch_command(dataset, root)} {FROM}"
    raise DataError(
        f"{dataset.title} cannot be fetched from any of these:\n" + "\n".join(tried),
        hint=f"put {', '.join(listed)} (raw, or .gz){own} into a folder DIR and run: {command}",
    )


def _checked(dataset: Dataset, location: str | Path, report: Report) -> Generator[tuple[str, bytes], None, None]:
    """Yield the files at a location, each verified against its checksum."""
    found = contents_at(location, [file.name for file in dataset.files], report)
    for file, (name, content) in zip(dataset.files, found, strict=True):
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise FetchFailed(
                f"{name} is not the official file: it has {len(content)} bytes of sha256 {digest}; it must have {file}"
            )
        yield name, content


def _store_own(dataset: Dataset, root: Path, given: Path, names: Sequence[str], report: Report) -> None:
    """Store files that the user created, with a record of their checksums, if they can be read as the data set."""
    files = {}
    with published(dataset.folder(root)) as staging:
        for name in names:
            report(FetchProgress("copying", 0, None))
            try:
                content = read_file(given / name)
            except OSError as error:
                raise DataError(f"{given / name} cannot be read: {error.strerror or error}") from error
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            fill(staging / name, content)
            file = DataFile(name, len(content), hashlib.sha256(content).hexdigest())
            files[name] = _StoredFile(staging / name, file, dataset.title, how_to_fix(dataset, root))
        fill(staging / RECORD, "".join(f"{f.file.sha256}  {name}\n" for name, f in files.items()).encode())
        for inner in {staging / above for name in names for above in Path(name).parents}:
            sync(inner)
        report(FetchProgress("checking the content", 0, None))
        dataset.read(_Contents(files))
    log.info("fetched %s from %s", dataset.name, given)
