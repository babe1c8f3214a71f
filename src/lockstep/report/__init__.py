"""The page of a run, or of several side by side. Everything but `read` is pure: from values to values."""
