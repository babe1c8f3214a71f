"""`lockstep replay`: repeats an old step, from the nearest kept checkpoint."""
