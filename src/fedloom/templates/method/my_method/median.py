"""Coordinate-wise median of the updates (Yin et al. 2018, arXiv 1803.01498, option I)."""

from pydantic import Field

from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings


class MedianSettings(FedAvgSettings):
    """Keys of ``algorithm``: those of FedAvg, and one more."""

    step: float = Field(default=1.0, gt=0, description="factor on the median")


class Median(FedAvg):
    """FedAvg with the median of the updates in place of their mean."""

    name = "my-median"
    version = 1
    settings = MedianSettings
    predictors = {"personal": "Median + fine-tuning", "global": "Median"}

    def aggregate(self, shared, updates, s):
        """Return the shared model after a round, ``[d]``; ``updates.delta_theta`` is ``[c, d]``."""
        arrived = updates.delta_theta[updates.present]  # rows of lost clients are zero
        return shared + s.step * arrived.median(0).values

    def needs_each_update(self, settings):
        """Return True: a median does not follow from a sum, so secure aggregation is refused."""
        return True


MEDIAN = Median()
