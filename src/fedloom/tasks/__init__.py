"""Prediction tasks: targets, losses and metrics. No other package contains code for targets."""
