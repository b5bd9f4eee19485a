"""FedLoom from Python: what ``import fedloom`` offers, and the command line is made of (docs/python.md)."""
