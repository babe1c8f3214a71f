"""Test support for the package and its users: `pool` runs functions on several ranks, `leaks` finds
leaks, `audit` finds faults of a training script."""

from lockstep.testing.audit import audit as audit
