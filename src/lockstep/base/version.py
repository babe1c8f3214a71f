"""The version of lockstep."""

__version__ = "0.1.0"
