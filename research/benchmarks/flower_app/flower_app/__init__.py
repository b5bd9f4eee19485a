"""FedAvg on LeNet in the style of Flower's documentation, for research/benchmarks/flower.py."""
