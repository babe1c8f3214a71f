"""The checks of `lockstep audit`: each holds what the probes saw against one law. Pure."""
