"""Packing: turn an owner's images, tables, arrays or text into one client's folder.

A reader for each format returns :class:`~fedloom.data.pack.examples.Examples`; ``pack`` splits, checks and writes them.
"""

from fedloom.data.pack.folder import FORMATS, Packed, PackSettings, pack

__all__ = ["FORMATS", "PackSettings", "Packed", "pack"]
