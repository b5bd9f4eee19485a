"""Identities, tokens, certificates and the audit log (docs/security.md), and the protocol of secure sums.

This package knows no transport: given a peer's credentials, it decides who the peer is and what it may do. Secure sums
(`secure_sum`) have no I/O.
"""
