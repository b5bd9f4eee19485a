"""Search of hyperparameters, and runs over grids and seeds."""
