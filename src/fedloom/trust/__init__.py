"""Who may speak to an aggregator, and about whom: identities, tokens, certificates, the audit log (docs/security.md).

It knows no transport: it is told what a peer has presented, and says who that is and what that one may do.
"""
