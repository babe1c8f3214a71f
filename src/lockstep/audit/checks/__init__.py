"""The checks of `lockstep audit`. Each check compares the records of a run with one rule of correct
training."""
