"""Imported by the nursery of the test pool: the checkpoint writers of its workers are forks of
them. A Python process that is started takes 50 ms of a core."""

from forked import fork_writers

fork_writers()
