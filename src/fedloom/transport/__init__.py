"""Transport over gRPC: aggregator, workers, and their wire protocol (docs/wire.md)."""
