"""Hyperparameter-divergent ensemble training."""
