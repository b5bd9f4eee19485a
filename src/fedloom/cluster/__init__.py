"""Starting of a federation: as processes on this machine, or as pods on Kubernetes (docs/cluster.md)."""
