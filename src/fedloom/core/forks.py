"""Children that fork a command, in place of importing FedLoom and torch again, which takes seconds.

A command that has imported what it needs leaves a copy of itself behind (:func:`prepared`), which waits. :class:`Child`
has the copy fork itself, and the fork runs another command. Without a copy, as in a notebook, a child is a new
interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from fedloom.core.processes import command

TITLE = "fedloom-forks"
"""Name of the copy in lists of processes."""

_SET_CHILD_SUBREAPER = 36  # option of prctl: orphans among our descendants become our children
_ARGUMENTS = 45  # place of the command line's start in /proc/self/stat, after the name

is_caught = False
"""Set by a program that catches :class:`Forked` where its stack begins; without it there is no copy."""

_copy: socket.socket | None = None
_asking = threading.Lock()


class Forked(BaseException):
    """Raised by :func:`prepared` in a child: its stack shall be unwound, and ``fedloom WORDS`` run."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self.words = words


class Child(subprocess.Popen[bytes]):
    """Process that runs ``fedloom WORDS`` in a session of its own, with a pipe as its standard input and no output.

    Parameters
    ----------
    words
        The command and its options.
    stderr
        File for its standard error.
    environment
        Its environment variables: those of this process, and more.
    cores
        Cores that it may use; all of this process's if empty.
    """

    def __init__(
        self, words: Sequence[str], stderr: IO[bytes], environment: Mapping[str, str], cores: Iterable[int] = ()
    ) -> None:
        self._message: dict[str, Any] = {"words": list(words), "environment": dict(environment), "cores": list(cores)}
        super().__init__(
            command(*words), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, env=environment,
            start_new_session=True,
        )  # fmt: skip
        if self._message["cores"]:
            with suppress(ProcessLookupError):  # it has already ended and reports why
                os.sched_setaffinity(self.pid, self._message["cores"])

    def _execute_child(self, arguments: Any, *others: Any) -> None:
        stdin, _, _, stdout, _, stderr = pipes = others[9:15]
        pid = _ask(self._message, (stdin, stdout, stderr))
        if pid is None:
            super()._execute_child(arguments, *others)  # type: ignore[misc]
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@contextmanager
def prepared(needed: bool) -> Iterator[None]:
    """Leave a copy behind after the block, which imports all that children need; raise Forked in its forks.

    There is no copy if it is not ``needed``, if Forked would not be caught (``is_caught``), or if forks would not be
    safe, or not be children of this process: if the block starts threads, if Python has some, if a GPU's driver is in
    use, and without Linux. (numpy's import starts threads for linear algebra, which may be forked.)
    """
    before = _threads()
    yield
    if needed and is_caught and sys.platform == "linux" and _threads() == before and threading.active_count() == 1:
        if "libcuda.so" not in Path("/proc/self/maps").read_text():
            _leave_copy()


def _threads() -> int:
    import numpy  # noqa: F401

    return len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 0


def _leave_copy() -> None:
    global _copy
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for file in filter(None, (sys.stdout, sys.stderr)):  # None for one that is closed
        file.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(its)
    its.close()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _copy = ours
    atexit.register(_end, ours, pid)


def _end(channel: socket.socket, pid: int) -> None:
    channel.close()
    os.waitpid(pid, 0)


def _ask(message: Mapping[str, Any], files: Sequence[int]) -> int | None:
    """Return the process id of a fork, or None if there is no copy, or it cannot fork."""
    if _copy is None:
        return None
    with _asking, suppress(OSError):
        socket.send_fds(_copy, [json.dumps(message).encode()], files)
        if answer := _copy.recv(64):
            return int(answer)
    return None


# --- the copy ---------------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> NoReturn:
    """Fork for each message, until the other end is closed; raise Forked in the forks."""
    os.setsid()  # Ctrl-C is for the command
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _retitle([TITLE])
    _take_files([os.open(os.devnull, os.O_RDWR)] * 3)
    gc.freeze()  # collections would copy the pages that forks share
    try:
        while True:
            message, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
            if not message:
                os._exit(0)
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                if child := os.fork():  # as `between` ends, the kernel hands its child to the command
                    os.write(writer, str(child).encode())
                    os._exit(0)
                break
            os.waitpid(between, 0)
            os.close(writer)
            channel.send(os.read(reader, 64))
            for file in (*files, reader):
                os.close(file)
    except OSError:
        os._exit(1)
    for file in (reader, writer, channel.detach()):
        os.close(file)
    _take_files(files)
    raise _begun(**json.loads(message))


def _take_files(files: Sequence[int]) -> None:
    for own, file in enumerate(files):
        os.dup2(file, own)
    for file in {*files} - {0, 1, 2}:
        os.close(file)


def _begun(words: list[str], environment: dict[str, str], cores: list[int]) -> Forked:
    """Return the exception of a fork, after adopting its environment."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _retitle(command(*words))
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in {"", str(Path.cwd()), *folders})]
    return Forked(words)


def _retitle(words: Sequence[str]) -> None:
    """Overwrite our command line, as others see it, with as much of these words as fits."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(number) for number in numbers[_ARGUMENTS : _ARGUMENTS + 2])
    title = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))
