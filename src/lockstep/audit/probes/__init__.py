"""The probes of `lockstep audit`, which patch torch in the processes of the audited script to
record the training."""
