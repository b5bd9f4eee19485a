"""Start Python processes without paying for their imports again.

A process of FedLoom imports torch before it does anything, which takes longer than most of what tests ask of it.
``Popen`` here is ``subprocess.Popen`` for commands of this interpreter: ``python -m``, ``-c``, a script, a command that
an installer made. The first starts a server that has imported torch and FedLoom; it and every later one is a fork of
that server, which takes the command's arguments, environment, folder and three standard files, and then runs it.

What it returns is a child of the caller, as any other: it has a pid, is waited for, polled and signalled, and ends
with an exit code. Two forks and ``PR_SET_CHILD_SUBREAPER`` do that: the one in between ends at once, and the kernel
hands its child on to the caller. The server never has more than one thread, so that forking it is safe.

A process that has been forked starts its own ``python -m ...`` in the same way, such as the workers of
``fedloom run --workers 2``: before it does anything else it forks a server of its own, which waits beside it.
``children`` and ``cmdline`` leave those out.

``FORKED_IMPORTS`` in a command's environment names more modules to import before the fork. There is a server for each
set of what environment variables say that are read at a start (``STARTS``), and another,
which has not imported FedLoom, for commands with packages on ``PYTHONPATH``, whose plugins FedLoom looks for when it is
imported. Started as usual are other programs, commands with another ``PYTHON...`` than ours, with ``preexec_fn`` or
``pass_fds``, and all where there is no Linux. Tests of the start itself, of imports, and of signals that arrive
meanwhile use ``subprocess``. Processes that FedLoom itself starts in a test's process are forks where the test uses
the fixture ``forks``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import pkgutil
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STARTS = (
    "CUDA", "FORCE_COLOR", "FORKED_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "MPL", "OMP_", "OPENBLAS_",
    "PYTHON", "TERMINAL_WIDTH", "TORCH", "TYPER_",
)  # fmt: skip
"""Beginnings of environment variables that are read once, when a process or a library starts."""

TAKEN_OVER = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""Variables among these that a fork can still adopt (``_become``). Importing torch's compiler sets the last one."""

FLAGS = ("-P", "-u")
"""Flags of the interpreter that a fork heeds."""

SERVER = "forked-server"  # name of a server in its command line
SERVERS = (SERVER, "fedloom-forks")  # and the name of a run's own, fedloom.core.forks.TITLE
TITLE_BYTES = 4096
OTHERS = (
    "torch", "torch.func", "numpy", "pydantic", "grpc", "grpc_health.v1.health", "yaml", "typer", "rich.progress",
    "safetensors.torch", "cryptography.x509", "cryptography.hazmat.primitives.asymmetric.x25519", "polyagamma", "isal",
    "google.protobuf.message", "google.protobuf.descriptor_pb2",
)  # fmt: skip
"""Packages that a server imports for commands with packages of their own, whose plugins FedLoom has yet to find."""

LEFT_OUT = (
    "fedloom.__main__", "fedloom.kubeflow", "fedloom.cluster",  # kfp and kubernetes: slow, and rarely needed
    "fedloom.trackers",  # each needs an optional package
)  # fmt: skip


def cmdline(pid: int) -> list[str]:
    """Return the arguments of a process; none for one that has ended, or for a server."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if words[0] in SERVERS else words


def children(pid: int) -> list[int]:
    """Return the child processes of a process, oldest first."""
    try:
        found = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [child for child in found if not _is_server(child)]


def _is_server(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode() in SERVERS
    except (FileNotFoundError, ProcessLookupError):
        return False


TASK = re.compile(
    r'program_path=\$\(mktemp -d\)\s+printf "%s" "\$0" > "\$program_path/ephemeral_component\.py"\s+_KFP_RUNTIME=true '
    r'(\S+) -m kfp\.dsl\.executor_main\s+--component_module_path\s+"\$program_path/ephemeral_component\.py"\s+"\$@"\s*'
)
"""Shell program of a task of Kubeflow Pipelines, whose arguments are the component's source and the executor's."""


# The caller's side -------------------------------------------------------------------------------------------------


class Server:
    """Caller's end of a process that forks itself on demand."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], files: tuple[int, int, int]) -> int:
        """Have the server fork; return the pid of the child, which becomes ours."""
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            answer = self._channel.recv(64)
        if not answer:
            raise ChildProcessError("the server that forks processes is gone")
        return int(answer)


Key = tuple[bool, frozenset[tuple[str, str]]]

_servers: dict[Key, Server] = {}
_starting = threading.Lock()


def _read_at_start(environment: Mapping[str, str], names: tuple[str, ...] = STARTS) -> frozenset[tuple[str, str]]:
    """Return the variables that are read at the start; an empty one counts as unset."""
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if value and name.startswith(names) and name not in TAKEN_OVER
    )


def _key(environment: Mapping[str, str]) -> Key:
    return _has_packages(environment), _read_at_start(environment)


def _server(environment: Mapping[str, str]) -> Server:
    """Return the server for commands with this environment; the first of them starts it."""
    key = _key(environment)
    with _starting:
        if key not in _servers:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                command = [sys.executable, __file__, str(its.fileno()), str(key[0]), " " * TITLE_BYTES]
                process = subprocess.Popen(
                    command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                    env={name: value for name, value in environment.items() if name != "PYTHONSAFEPATH"},
                )  # fmt: skip
            if ours.recv(64) != b"ready":
                raise ChildProcessError(f"the server that forks processes did not start: {process.wait()}")
            _servers[key] = Server(ours)
            atexit.register(_end, ours, process)
        return _servers[key]


def _end(channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.wait()


def _as_python(words: Sequence[str], environment: dict[str, str]) -> list[str] | None:
    """Return a command as ``[sys.executable, ...]``, as the kernel runs our scripts; None for other programs.

    A task of Kubeflow Pipelines is its Python process, without the shell around it.
    """
    if words[:2] == ["sh", "-ec"] and (task := TASK.fullmatch(words[2])) and task[1] == sys.executable:
        file = Path(tempfile.mkdtemp()) / "ephemeral_component.py"
        file.write_text(words[3])
        environment["_KFP_RUNTIME"] = "true"
        return [task[1], "-m", "kfp.dsl.executor_main", "--component_module_path", str(file), *words[4:]]
    if words[0] != sys.executable:
        try:
            with Path(words[0]).open("rb") as file:
                if file.readline().strip() != b"#!" + os.fsencode(sys.executable):
                    return None
        except OSError:
            return None
        words = [sys.executable, *words]
    first = words[1 + len(_flags(words)) :][:1]
    return list(words) if first and (first[0] in ("-m", "-c") or first[0][0] != "-") else None


def _flags(words: Sequence[str]) -> list[str]:
    """Return the flags of ``python FLAGS ...``."""
    return list(itertools.takewhile(FLAGS.__contains__, words[1:]))


_real_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_real_execute_child)


def _execute_child(self: subprocess.Popen[Any], *arguments: Any) -> None:
    """Replace ``subprocess.Popen._execute_child``: request a fork where possible."""
    given = _parameters.bind(self, *arguments).arguments
    words = [os.fsdecode(word) for word in ([given["args"]] if isinstance(given["args"], str) else given["args"])]
    environment = dict(os.environ if given["env"] is None else given["env"])
    dies_with_parent = getattr(self, "dies_with_parent", False)
    python = None
    if sys.platform == "linux" and not any(given[name] for name in ("shell", "preexec_fn", "pass_fds", "executable")):
        python = _as_python(words, environment)
    other = _read_at_start(environment, ("PYTHON",)) != _read_at_start(os.environ, ("PYTHON",))
    if python is None or other:
        if dies_with_parent and shutil.which("setpriv"):
            given["args"] = ["setpriv", "--pdeathsig", "KILL", "--", *words]
        _real_execute_child(*given.values())
        return
    request = {
        "words": python,
        "environment": environment,
        "folder": os.fspath(given["cwd"] or Path.cwd()),
        "new_session": given["start_new_session"],
        "group": os.getpgrp(),
        "dies_with_parent": dies_with_parent,
    }
    ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    stdin, stdout, stderr = (own if end == -1 else end for own, end in enumerate(ends))
    self.pid = _server(environment).fork(request, (stdin, stdout, stderr))
    self._child_created = True  # type: ignore[attr-defined]
    pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
    self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _has_packages(environment: Mapping[str, str]) -> bool:
    """Return True if packages lie on the search path."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return any(True for folder in folders if folder for _ in Path(folder).glob("*.dist-info"))


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks one of our servers where possible.

    Parameters
    ----------
    dies_with_parent
        The kernel kills the process when this one ends for any reason.
    """

    def __init__(self, *arguments: Any, dies_with_parent: bool = False, **options: Any) -> None:
        self.dies_with_parent = dies_with_parent
        super().__init__(*arguments, **options)

    _execute_child = _execute_child


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` with that ``Popen``."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# The server's side --------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork on request, for ever; return in each child, with its request."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            child = os.fork()
            if child:
                os.write(writer, str(child).encode())
                os._exit(0)
            while os.getppid() == middle:  # until the caller is our parent
                time.sleep(0.0002)
            for own, file in enumerate(files):
                os.dup2(file, own)
            for file in (*files, reader, writer, channel.detach()):
                os.close(file)
            request: dict[str, Any] = json.loads(message)
            return request
        os.close(writer)
        for file in files:
            os.close(file)
        os.waitpid(middle, 0)
        channel.send(os.read(reader, 64))
        os.close(reader)


_before: list[Any] = []


def _become(request: dict[str, Any]) -> None:
    """Apply the initial state of a process from the request."""
    _retitle(request["words"])
    if request["new_session"]:
        os.setsid()
    elif os.getpgrp() != request["group"]:
        os.setpgid(0, request["group"])
    if request["dies_with_parent"]:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(request["folder"])
    _take_search_path(request["environment"].get("PYTHONPATH", ""))
    for name in set(os.environ) - set(request["environment"]):
        del os.environ[name]
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in _flags(request["words"])
    time.tzset()
    tempfile.tempdir = None
    # Buffers of the server's files remember if those could seek.
    for own, (name, mode) in enumerate((("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb"))):
        before, through = getattr(sys, name), unbuffered and name != "stdin"
        file = io.TextIOWrapper(
            open(own, mode, buffering=0 if through else -1, closefd=False),  # noqa: SIM115
            before.encoding, before.errors, line_buffering=name == "stderr" or os.isatty(own), write_through=through,
        )  # fmt: skip
        _before.append(before)  # closing it would close the file
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _take_search_path(theirs: str) -> None:
    """Import from these folders in place of those of this process's own ``PYTHONPATH``."""
    ours, its = (
        [str(Path(folder).absolute()) for folder in path.split(os.pathsep) if folder]
        for path in (os.environ.get("PYTHONPATH", ""), theirs)
    )
    others = [folder for folder in sys.path[1:] if folder not in {*ours, *its}]
    sys.path[1:] = [*dict.fromkeys(its), *others]  # the first is that of the script


def _retitle(words: Sequence[str]) -> None:
    """Set our command line as others see it: the server starts with a long one, which is overwritten."""
    where = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(where[45]), int(where[46])
    title = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, min(len(title), end - start))


def _split() -> socket.socket | None:
    """Leave a server behind for the processes that this one will start; return its channel in the server."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setpgid(0, 0)  # waiting for the end of our group does not include the server
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in range(3):
            os.dup2(nothing, file)
        os.close(nothing)
        _stand_by()
        return its
    its.close()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _servers.clear()
    _servers[sys.argv[2] == "True", _read_at_start(os.environ)] = Server(ours)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    return None


def _stand_by() -> None:
    _retitle([SERVER])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _import(packages: bool) -> None:
    """Import the modules of commands; not FedLoom for commands with ``packages`` of their own."""
    for name in (*OTHERS, *os.environ.get("FORKED_IMPORTS", "").split()):
        importlib.import_module(name)

    def walk(package: Any) -> None:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name not in LEFT_OUT:
                found = importlib.import_module(module.name)
                if module.ispkg:
                    walk(found)

    if not packages:
        walk(importlib.import_module("fedloom"))
    tasks = len(list(Path("/proc/self/task").iterdir()))
    assert tasks == 1, f"the server that forks processes has {tasks} threads; forks of it could hang"


def _run(words: Sequence[str]) -> None:
    """Run ``python WORDS``."""
    flags = _flags(words)
    safe = "-P" in flags or bool(os.environ.get("PYTHONSAFEPATH"))
    words = [words[0], *words[1 + len(flags) :]]
    kind, sys.argv = words[1], list(words[1:])
    if safe:
        del sys.path[0]
    if kind == "-m":
        sys.argv = list(words[2:])
        if not safe:
            sys.path[0] = str(Path.cwd())
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *words[3:]]
        if not safe:
            sys.path[0] = ""
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[2], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def _code_of(words: Sequence[str]) -> int:
    """Run ``python WORDS``; return the exit code that Python would use."""
    try:
        _run(words)
    except SystemExit as ending:
        if isinstance(ending.code, int) or ending.code is None:
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    """End as Python does, but without destroying all imported modules, which takes longer than most processes."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except (OSError, ValueError):
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the command does so too late for an already imported gRPC
    channel: socket.socket | None = socket.socket(fileno=int(sys.argv[1]))
    packages = sys.argv[2] == "True"
    gc.disable()
    _import(packages)
    gc.freeze()  # collections here and in forks skip imported objects
    gc.enable()
    _stand_by()
    assert channel is not None
    channel.send(b"ready")
    words: list[str] = []
    while channel is not None:
        request = _serve(channel)
        words = request["words"]
        _become(request)
        channel = _split()
    _exit(_code_of(words))


if __name__ == "__main__":
    # Processes started by a fork are forked through a module of this name, as if it had been imported.
    sys.modules["forked"] = sys.modules["__main__"]
    _main()
