"""Tests of lockstep.comm. Without this file, the package `comm` that ipykernel brings would be
found instead."""
