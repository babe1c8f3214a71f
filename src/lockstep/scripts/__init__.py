"""Runs the user's script for every command: its command line, its request, and its processes."""
