"""FedAvg on LeNet in the style of Flower's documentation, for benchmarks/flower.py."""
