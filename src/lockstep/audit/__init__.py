"""`lockstep audit`: runs a training script that does not use lockstep, and checks if it follows
rules of correct training, such as that all ranks hold the same model."""
