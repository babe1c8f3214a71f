"""`lockstep verify`: does a plan train the same model? Runs of the user's script, what each left in its trace, and their comparison."""
