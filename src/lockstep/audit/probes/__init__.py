"""The probes of `lockstep audit`. They patch torch in the processes of the audited script to record
a training."""
