"""Methods: one module each, with the server algorithm, the client algorithm and the settings."""
