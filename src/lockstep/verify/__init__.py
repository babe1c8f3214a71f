"""`lockstep verify`: runs a script on one process and under each plan, and compares the traces of
the runs."""
