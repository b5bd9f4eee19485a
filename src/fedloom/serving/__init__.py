"""Models of a run's clients and of newcomers: saved, personalized and served."""
