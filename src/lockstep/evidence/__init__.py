"""Evidence, for `lockstep verify` and `lockstep audit`: traces, sketches, fits, tolerance."""
