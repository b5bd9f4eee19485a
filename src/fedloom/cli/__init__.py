"""The ``fedloom`` command: thin, and the one place where the parts are put together."""
