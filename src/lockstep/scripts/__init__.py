"""Starts the user's script for every command: its command line, its request, its processes and how
they end."""
