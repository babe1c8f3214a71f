"""Several models that are evaluated as one."""
