"""Federated averaging, personalized by local steps.

B. McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017,
arXiv 1602.05629, Algorithm 1. The global model is always reported. Each client's own predictor is the global model
after 0 or more local SGD steps on its train split (fine-tuning). The recipe provides both.
"""

from fedloom.algorithms.recipe import FineTuning, shared_model


class FedAvgSettings(FineTuning):
    """Keys of ``algorithm`` for FedAvg."""


FEDAVG = shared_model("fedavg", FedAvgSettings, titles={"personal": "FedAvg + fine-tuning", "global": "FedAvg"})
