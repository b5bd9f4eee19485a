"""Quantities on the wire: the gRPC aggregator, the gRPC worker, and what they say to each other (docs/wire.md)."""
