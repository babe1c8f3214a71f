"""`lockstep doctor`: check and time one machine, or several together, before a training run."""
