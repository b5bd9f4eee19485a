"""Identities, tokens, certificates and the audit log (docs/security.md).

This package knows no transport: given a peer's credentials, it decides who the peer is and what it may do.
"""
