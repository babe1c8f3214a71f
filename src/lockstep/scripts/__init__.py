"""Starts the user's script for every command: its line, its request, its processes and their
end."""
