"""Python API: the names of ``import fedloom``, which the command line also uses (docs/python.md)."""
