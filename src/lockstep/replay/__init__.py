"""`lockstep replay`: an old step again, from the nearest kept checkpoint."""
