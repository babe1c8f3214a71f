"""Runs one check: `python check.py NAME[:ARGUMENT-...]`. Its results go to the file
$GPU_CHECK_RESULTS."""

from __future__ import annotations

import sys

import commands
import documents
import kernels
import machine
import ranks
import speed

CHECKS = {
    "facts": machine.facts,
    "kernels": kernels.kernels,
    "bits": ranks.bits,
    "nccl2": ranks.nccl2,
    "nccl4": ranks.nccl4,
    "pipelines": ranks.pipelines,
    "gloo2": ranks.gloo2,
    "kill": ranks.kill,
    "peer": ranks.peer,
    "raises": ranks.raises,
    "hang": ranks.hang,
    "oom": commands.oom,
    "context": documents.context,
    "speed": speed.speed,
    "plan": speed.plan,
    "waits": speed.waits,
    "stall": speed.stall,
    "times": speed.times,
    "example": commands.example,
    "verify": commands.verify,
    "doctor": commands.doctor,
    "here": commands.here,
}

if __name__ == "__main__":
    name, _, arguments = sys.argv[1].partition(":")
    CHECKS[name](*filter(None, arguments.split("-")))
