"""Figures of a search's page: the best so far, parallel coordinates, curves, importance, and the
table of trials."""
