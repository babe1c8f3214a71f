"""`lockstep plan`: predicts memory and time of a step under each plan, without the devices."""
