"""Small helpers for all packages."""
