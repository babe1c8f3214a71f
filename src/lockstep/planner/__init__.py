"""`lockstep plan`: memory and time of a step under each plan, predicted without the devices."""
