"""The checks of `lockstep audit`: each compares the probes' records with one law. Pure."""
