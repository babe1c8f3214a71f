"""Many trainings at once: hyper-parameter search, sweeps and population-based training, on
Optuna."""
