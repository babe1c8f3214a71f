"""`lockstep replay`: repeats an old step of a run from a kept checkpoint."""
