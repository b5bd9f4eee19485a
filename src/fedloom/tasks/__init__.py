"""Prediction tasks: targets, losses and metrics. No other package knows what a target is."""
