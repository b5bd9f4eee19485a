"""Remove files that FedLoom never reads from an image's packages, during the image build (docs/chart.md).

``python slim.py MODULE...`` removes headers, tests, type stubs, torch's programs, and symbols for linkers and debuggers
from the installed packages. Then it compiles the given modules and everything they import, because nothing can be
compiled at run time on a read-only root file system. All of FedLoom is compiled.
"""

from __future__ import annotations

import compileall
import importlib
import shutil
import struct
import sys
import sysconfig
from pathlib import Path

FOLDERS = (
    "torch/include", "torch/share", "torch/test", "**/tests", "sympy/**/benchmarks", "Crypto/SelfTest",
)  # fmt: skip
"""Folders to remove."""
FILES = ("**/*.pyi", "**/*.pyx", "**/*.pxd", "torch/bin/*")
KEPT = ("torch/bin/torch_shm_manager",)
"""Files to keep: torch does not start without them."""

WORTH = 2**18
"""Minimum size of removable symbols, in bytes; libraries with fewer are left unchanged."""

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")


def removed(site: Path) -> None:
    """Remove the folders and files that are never read."""
    for pattern in FOLDERS:
        for folder in [path for path in site.glob(pattern) if path.is_dir()]:
            shutil.rmtree(folder, ignore_errors=True)
    for pattern in FILES:
        for path in site.glob(pattern):
            if path.is_file() and str(path.relative_to(site)) not in KEPT:
                path.unlink()


def without_symbols(library: Path) -> None:
    """Truncate a library after its last loaded byte, removing sections such as ``.symtab``.

    The dynamic symbols (``.dynsym``), by which libraries find each other's functions, are loaded and therefore kept.
    """
    with library.open("rb") as file:  # read-only: opening it for writing would copy it into this layer
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return
        fields = list(HEADER.unpack(head))
        programs, sections, entries = fields[5], fields[6], fields[10]
        file.seek(programs)
        parts = [PROGRAM_HEADER.unpack(file.read(PROGRAM_HEADER.size)) for _ in range(entries)]
    end = max(programs + entries * PROGRAM_HEADER.size, *(part[2] + part[5] for part in parts))  # offset and size
    if sections < end or library.stat().st_size - end < WORTH:  # already truncated, or too few symbols
        return
    fields[6], fields[12], fields[13] = 0, 0, 0  # section table: offset, count, index of the names
    with library.open("r+b") as file:
        file.write(HEADER.pack(*fields))
        file.truncate(end)


def main() -> None:
    """Slim this interpreter's packages and compile the modules given as arguments."""
    site = Path(sysconfig.get_path("purelib"))
    removed(site)
    for library in site.glob("**/*.so*"):
        without_symbols(library)
    sys.dont_write_bytecode = False
    for name in sys.argv[1:]:
        importlib.import_module(name)
    compileall.compile_dir(site / "fedloom", quiet=1)


if __name__ == "__main__":
    main()
