"""The probes of `lockstep audit`: they watch a training script from within its processes, without
changing it."""
