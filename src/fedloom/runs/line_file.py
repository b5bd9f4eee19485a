"""Files of JSON lines, appended to line by line; every line that is read is checked against its digest."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedloom.core import digests
from fedloom.core.words import parsed_json
from fedloom.errors import DataError, as_storage_error
from fedloom.storage.folder import open_file, opened, staged, storing, sync, write_atomically

PIECE = 1 << 20


class Placed(NamedTuple):
    """Line of a line file: its start and end in bytes, its object and its digest.

    ``whole`` is False if a crash cut the line short; then it has no object.
    """

    start: int
    end: int
    object: dict[str, Any] | None
    whole: bool
    digest: str = ""


class LineFile:
    """File of JSON objects, one per line, each with a digest chained over the lines before.

    Every reader raises ``DataError`` with the file, the line and what to do if a line has been changed. ``ending``
    returns the digest of the last line if it is known that nothing has been appended since; else None.
    """

    def __init__(self, path: Path, ending: Callable[[], str | None] = lambda: None) -> None:
        self.path = path
        self._ending = ending

    def last_digest(self) -> str:
        """Return the digest of the last line, unchecked; for a file without lines, the initial digest.

        Raise DataError if the end of the file is not a complete line.
        """
        try:
            with open_file(self.path) as file:
                return self._before(file, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            return digests.beginning(self.path.name)
        except OSError as error:
            raise as_storage_error(error) from error

    def has_line(self, end: int, digest: str) -> bool:
        """Return whether a line with this digest ends at byte ``end``, and so whether all lines up to it are the same.

        Byte 0 has the digest of :func:`digests.beginning`.
        """
        try:
            with open_file(self.path) as file:
                return self._before(file, end, torn=True) == digest
        except OSError:
            return False

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one object as a line."""
        line = digests.line_of(value, self.last_digest())
        with storing(self.path), self.path.open("ab") as file:
            file.write(line)

    def rewrite(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Replace all lines."""
        before, lines = digests.beginning(self.path.name), []
        for value in values:
            lines.append(digests.line_of(value, before))
            before = digests.check_line(lines[-1], before)
        write_atomically(self.path, b"".join(lines))

    def cut(self, end: int) -> None:
        """Truncate the file to ``end`` bytes, a line boundary. A shorter file stays unchanged."""
        path = self.path
        with storing(path):
            if not path.exists() or path.stat().st_size <= end:
                return
        with staged(path) as partial:
            with path.open("rb") as whole, partial.open("wb") as kept:
                while piece := whole.read(min(end - kept.tell(), PIECE)):
                    kept.write(piece)
            sync(partial)
            partial.replace(path)
            sync(path.parent)

    def forwards(self, skipped: Callable[[bytes], bool] = lambda line: False, start: int = 0) -> Iterator[Placed]:
        """Yield the lines from byte ``start``, where one begins, except those ``skipped``; none if there is no file."""
        expected, end, before = self._ending(), start, ""
        try:
            with open_file(self.path) as file:
                before = self._before(file, start)
                file.seek(start)
                for line in file:  # binary: only \n ends a line
                    start, end = end, end + len(line)
                    if not line.endswith(b"\n"):
                        yield Placed(start, end, None, whole=False)
                        break
                    before = self._checked(line, before, start)
                    if not skipped(line):
                        yield Placed(start, end, self._object(line, start), whole=True, digest=before)
        except FileNotFoundError:
            before = digests.beginning(self.path.name)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        self._check_end(before, expected)

    def backwards(self, beginning: str = "") -> Iterator[Placed]:
        """Yield the lines like :meth:`forwards`, from the last to the first.

        The time to the first line does not depend on the length of the file. Lines without the ``beginning`` are
        skipped, and their digests are not checked.
        """
        expected, start = self._ending(), beginning.encode()
        try:
            with open_file(self.path) as file:
                end = os.fstat(file.fileno()).st_size
                self._check_end(self._before(file, end, torn=True), expected)
                if not end:
                    return
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    while end:
                        at = content.rfind(b"\n" + start, 0, end - 1) + 1
                        stop = content.find(b"\n", at) + 1 or len(content)
                        line, end = content[at:stop], at
                        if not line.endswith(b"\n"):
                            yield Placed(at, stop, None, whole=False)
                        elif line.startswith(start):
                            digest = self._checked(line, self._before(file, at), at)
                            yield Placed(at, stop, self._object(line, at), whole=True, digest=digest)
        except FileNotFoundError:
            self._check_end(digests.beginning(self.path.name), expected)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error})") from error

    def _before(self, file: BinaryIO, at: int, *, torn: bool = False) -> str:
        """Return the digest in the line that ends at a byte; with ``torn``, empty if no line ends there."""
        if at == 0:
            return digests.beginning(self.path.name)
        begin = max(0, at - digests.TAIL)
        found = digests.stated_digest(os.pread(file.fileno(), at - begin, begin))
        if found is None and not torn:
            raise self._damaged(at - 1, "it does not end with a digest")
        return found or ""

    def _checked(self, line: bytes, before: str, start: int) -> str:
        try:
            return digests.check_line(line, before)
        except digests.Damaged as error:
            raise self._damaged(start, str(error)) from None

    def _object(self, line: bytes, start: int) -> dict[str, Any]:
        found = as_object(line)
        if found is None:
            raise self._damaged(start, "it is not a JSON object")
        del found["digest"]
        return found

    def _check_end(self, found: str, expected: str | None) -> None:
        """Compare the last digest with that of a finished run, unless the run has been resumed meanwhile."""
        if expected is not None and found != expected and self._ending() == expected:
            raise DataError(
                f"{self.path} is damaged: it does not end with its last line as of the end of the run",
                hint=digests.RESTORE,
            )

    def _damaged(self, start: int, why: str) -> DataError:
        with opened(self.path) as file:
            number = file.read(start).count(b"\n") + 1
        return DataError(f"{self.path}, line {number} is damaged: {why}", hint=digests.RESTORE)


def as_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if the line is not a JSON object."""
    try:
        value = parsed_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
