"""Finds the likely cause of a difference. Each known fault leaves a pattern in the trace."""
