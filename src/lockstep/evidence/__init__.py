"""Traces of runs, sketches of tensors, and tolerances, for `lockstep verify` and `lockstep
audit`."""
