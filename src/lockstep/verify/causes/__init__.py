"""Finds the likely cause of a difference: each known fault leaves a pattern in the trace. Pure."""
