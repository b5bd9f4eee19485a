"""Packing: examples that a client's owner has, as images, tables, arrays or text, become one client's folder.

A reader for each format gives :class:`~fedloom.data.pack.examples.Examples`; ``pack`` divides, checks and writes them.
"""

from fedloom.data.pack.folder import FORMATS, Packed, PackSettings, pack

__all__ = ["FORMATS", "PackSettings", "Packed", "pack"]
