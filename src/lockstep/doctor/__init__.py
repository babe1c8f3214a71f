"""`lockstep doctor`: checks and times one machine or several, before a training."""
