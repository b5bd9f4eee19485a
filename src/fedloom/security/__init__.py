"""Identities, tokens, certificates and the audit log (docs/security.md), and the protocol of secure sums.

This package does not depend on a transport: given a peer's credentials, it identifies the peer and checks its
permissions. Secure sums (`secure_sum`) have no I/O.
"""
