"""Takes out of an image's packages what no process of FedLoom reads, while the image is built (docs/images.md).

``python slim.py MODULE...`` removes from the folder of packages headers, tests, type stubs, torch's own programs, and
symbols that only a linker or a debugger reads. Then it compiles the modules named and all that they import: nothing can
be compiled at run time, since the root file system is read-only. FedLoom itself is compiled whole.
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
"""Of packages, whole."""
FILES = ("**/*.pyi", "**/*.pyx", "**/*.pxd", "torch/bin/*")
KEPT = ("torch/bin/torch_shm_manager",)
"""Torch does not start without it."""

WORTH = 2**18
"""Bytes of symbols below which a library stays as it is."""

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")


def removed(site: Path) -> None:
    """Remove folders and files that are not read."""
    for pattern in FOLDERS:
        for folder in [path for path in site.glob(pattern) if path.is_dir()]:
            shutil.rmtree(folder, ignore_errors=True)
    for pattern in FILES:
        for path in site.glob(pattern):
            if path.is_file() and str(path.relative_to(site)) not in KEPT:
                path.unlink()


def without_symbols(library: Path) -> None:
    """Cut off what comes after the last byte that is loaded: sections for linkers and debuggers, such as ``.symtab``.

    The names by which libraries find each other's functions (``.dynsym``) are loaded, and stay.
    """
    with library.open("rb") as file:  # not for writing: that alone would copy it into this layer
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return
        fields = list(HEADER.unpack(head))
        programs, sections, entries = fields[5], fields[6], fields[10]
        file.seek(programs)
        parts = [PROGRAM_HEADER.unpack(file.read(PROGRAM_HEADER.size)) for _ in range(entries)]
    end = max(programs + entries * PROGRAM_HEADER.size, *(part[2] + part[5] for part in parts))  # offset and size
    if sections < end or library.stat().st_size - end < WORTH:  # no table of sections: cut already
        return
    fields[6], fields[12], fields[13] = 0, 0, 0  # the table of sections: where, how many, which one names them
    with library.open("r+b") as file:
        file.write(HEADER.pack(*fields))
        file.truncate(end)


def main() -> None:
    """Slim the packages beside this interpreter, and compile the modules named in the arguments."""
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
