"""Hyper-parameter search, sweeps and population-based training, on Optuna."""
