"""`lockstep audit`: runs a training script that does not use lockstep, and holds what it did
against the laws."""
