"""FedAvg on LeNet, written the way Flower's documentation does, for benchmarks/flower.py."""
