"""`lockstep audit`: runs a training script that does not use lockstep, and checks it for faults."""
