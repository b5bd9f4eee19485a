"""Command line of FedLoom: thin commands over the library."""
