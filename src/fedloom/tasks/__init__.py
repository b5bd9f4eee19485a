"""Prediction tasks: targets, losses and metrics. No other room knows what a target is."""
