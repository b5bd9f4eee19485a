"""FedLoom: personalized federated learning on one machine, on Kubernetes, under Kubeflow."""

__version__ = "0.1.0"
