"""`lockstep plan`: predicts the memory and the time of a training step under each plan, without the
devices."""
