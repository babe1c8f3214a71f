"""The checks of `lockstep audit`: each compares the probes' records with one rule of correct
training. Pure."""
