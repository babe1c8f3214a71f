"""`lockstep verify`: runs the user's script on one process and under each plan, and compares the
traces of the runs."""
