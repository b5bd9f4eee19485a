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

from fedloom.core.files import fill, sync
from fedloom.data.datasets.base import DataFile, Dataset, FetchFailed, FetchProgress, RawDataset, Report
from fedloom.data.datasets.locations import contents_at, location_title
from fedloom.data.folders import check_digest, data_root, locked, published, read_stored
from fedloom.errors import DataError

log = logging.getLogger("fedloom.data")

RECORD = "SHA256SUMS"
"""File with the checksums of files that a user supplied, in the format of ``sha256sum``."""

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
    for dependency in dataset.needs:
        fetch_dataset(dependency, root, on_progress=on_progress)
    home = data_root(root)
    folder = dataset.folder(home)
    source = None if copy_from is None else Path(copy_from)
    own = () if source is None or dataset.own is None else dataset.own.names(source)
    if source is not None and not own and not dataset.files:
        raise DataError(f"{dataset.title} is not in {source}", hint=_how_to_fix(dataset, home))
    with locked(folder):
        if source is not None and own:
            _store_own(dataset, home, source, own, report)
        elif source is not None or not _is_intact(dataset, home):
            _store_official(dataset, home, dataset.locations if source is None else (source,), report)
    return folder


def load_dataset(dataset: Dataset, root: Path | str | None = None) -> RawDataset:
    """Return the content of a data set's files, read from disk and verified against their checksums.

    Raise DataError if the files are missing or damaged, or the examples do not match the data set's description.
    """
    return _read_dataset(dataset, _stored_files(dataset, data_root(root)))


def checksums(dataset: Dataset, root: Path | str | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file that :func:`load_dataset` reads, by name, without reading the files.

    Checksums of files that the user supplied were recorded at fetch time.

    Raise DataError if there are no official files, and none of the user's are stored.
    """
    return {name: stored.file.sha256 for name, stored in _stored_files(dataset, data_root(root)).items()}


def size_on_disk(dataset: Dataset, root: Path | str | None = None) -> int | None:
    """Return the size on disk of a data set's own files in bytes; None unless all of them are there.

    Known sizes are compared, checksums are not: no file is read except the record of a user's files.
    """
    home = data_root(root)
    if dataset.synthetic or not dataset.folder(home).is_dir():
        return None
    try:
        files = _stored_files(dataclasses.replace(dataset, needs=()), home).values()
        sizes = [stored.path.stat().st_size for stored in files]
    except (DataError, FileNotFoundError):
        return None
    intact = all(stored.file.size in (None, size) for stored, size in zip(files, sizes, strict=True))
    return sum(sizes) if intact else None


@dataclass(frozen=True)
class _StoredFile:
    """File of a data set, and the path where it is stored."""

    path: Path
    file: DataFile
    title: str
    hint: str

    def content(self) -> bytes:
        """Return its content, verified against its checksum."""
        content = read_stored(self.path, f"{self.title} is missing", self.hint)
        check_digest(content, self.file.sha256, str(self.path), self.hint)
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


def _read_dataset(dataset: Dataset, files: Mapping[str, _StoredFile]) -> RawDataset:
    """Return the content of files; raise DataError if the examples do not match the data set's description."""
    official = dataset.read(_Contents(files))
    most = 0 if official.owners is None else len(official.owners.names)
    for name, pool in (("train", official.train), ("test", official.test)):
        fault = dataset.spec.examples_fault(pool.inputs, pool.labels)
        owners = pool.owners if pool.owners is not None else pool.labels[:0]
        if fault is None and (
            (pool.owners is None) != (official.owners is None)
            or (official.owners is not None and len(owners) != len(pool))
            or (len(owners) and not 0 <= int(owners.min()) <= int(owners.max()) < most)
        ):
            fault = f"each must have one of the {most} owners, or none may have any"
        if fault is not None:
            raise DataError(f"{name} examples of {dataset.name}: {fault}")
    return official


def _stored_files(dataset: Dataset, root: Path) -> dict[str, _StoredFile]:
    """Return the files of a data set and of those it needs, by name, without checking that they exist."""
    if dataset.synthetic:
        return {}
    folder, hint = dataset.folder(root), _how_to_fix(dataset, root)
    files = dataset.files
    if dataset.own is not None and (not files or (folder / RECORD).exists()):
        files = _recorded_files(
            read_stored(folder / RECORD, f"{dataset.title} is missing", hint), folder / RECORD, hint
        )
    of_needed = {name: file for dependency in dataset.needs for name, file in _stored_files(dependency, root).items()}
    return of_needed | {file.name: _StoredFile(folder / file.name, file, dataset.title, hint) for file in files}


def _recorded_files(content: bytes, record: Path, hint: str) -> tuple[DataFile, ...]:
    files = []
    for line in content.decode("utf-8", errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ((?:[^./][^/]*/)*[^./][^/]*)", line)
        if match is None:
            raise DataError(f"{record} is damaged: {line!r} is not a sha256 and a file name", hint=hint)
        files.append(DataFile(match[2], None, match[1]))
    return tuple(files)


def _how_to_fix(dataset: Dataset, root: Path) -> str:
    """Return the command that stores a data set's files under a data root."""
    if dataset.at is not None:
        return f"remove {dataset.at} to recreate it from data.source.path"
    where_from = "" if dataset.files or dataset.own is None else f" {FROM}, where DIR holds {dataset.own.expected}"
    return f"fetch it: {_fetch_command(dataset, root)}{where_from}"


def _fetch_command(dataset: Dataset, root: Path) -> str:
    prefix = "" if root == data_root() else f"FEDLOOM_DATA={shlex.quote(str(root))} "
    return f"{prefix}fedloom data fetch {dataset.name}"


def _is_intact(dataset: Dataset, root: Path) -> bool:
    """Return True if a data set's files are complete and intact, and log any error."""
    if not dataset.folder(root).exists():
        return False
    try:
        for stored in _stored_files(dataset, root).values():
            stored.content()
    except DataError as error:
        log.warning("%s; fetching it again", str(error).splitlines()[0])
        return False
    return True


def _store_official(dataset: Dataset, root: Path, locations: Sequence[str | Path], report: Report) -> None:
    """Store the files of the first location that has all of them."""
    if not dataset.files:
        raise DataError(f"{dataset.title} has no official files to fetch", hint=_how_to_fix(dataset, root))
    failures = []
    for location in locations:
        title = location_title(location)
        report(FetchProgress(title, 0, None))
        try:
            with (
                published(dataset.folder(root)) as staging,
                closing(_verified_contents(dataset, location, report)) as files,
            ):
                for name, content in files:
                    fill(staging / name, content)
                sync(staging)
        except FetchFailed as failure:
            log.debug("%s: %s failed: %s", dataset.name, title, failure)
            failures.append(f"  - {title}: {failure}")
        else:
            log.info("fetched %s from %s", dataset.name, title)
            return
    names = [file.name for file in dataset.files]
    names_shown = names if len(names) <= 8 else [*names[:6], "...", names[-1]]
    own = "" if dataset.own is None else f" (or {dataset.own.expected})"
    raise DataError(
        f"{dataset.title} cannot be fetched from any of these:\n" + "\n".join(failures),
        hint=f"put {', '.join(names_shown)} (raw, or .gz){own} into a folder DIR and run: "
        f"{_fetch_command(dataset, root)} {FROM}",
    )


def _verified_contents(
    dataset: Dataset, location: str | Path, report: Report
) -> Generator[tuple[str, bytes], None, None]:
    """Yield the files at a location, each verified against its checksum."""
    contents = contents_at(location, [file.name for file in dataset.files], report)
    for file, (name, content) in zip(dataset.files, contents, strict=True):
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise FetchFailed(
                f"{name} is not the official file: it has {len(content)} bytes of sha256 {digest}; it must have {file}"
            )
        yield name, content


def _store_own(dataset: Dataset, root: Path, source: Path, names: Sequence[str], report: Report) -> None:
    """Store files that the user created, with a record of their checksums, if they can be read as the data set."""
    files = {}
    hint = _how_to_fix(dataset, root)
    with published(dataset.folder(root)) as staging:
        for name in names:
            report(FetchProgress("copying", 0, None))
            content = read_stored(source / name, f"{dataset.title} is missing", hint, shared=False)
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            fill(staging / name, content)
            file = DataFile(name, len(content), hashlib.sha256(content).hexdigest())
            files[name] = _StoredFile(staging / name, file, dataset.title, hint)
        fill(staging / RECORD, "".join(f"{f.file.sha256}  {name}\n" for name, f in files.items()).encode())
        for inner in {staging / above for name in names for above in Path(name).parents}:
            sync(inner)
        report(FetchProgress("checking the content", 0, None))
        _read_dataset(dataset, files)
    log.info("fetched %s from %s", dataset.name, source)
