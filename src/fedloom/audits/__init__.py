"""Audits of runs by attacks."""
