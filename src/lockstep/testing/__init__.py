"""Test support: `pool` runs functions on several ranks, `leaks` finds leaks, and `audit` finds
faults of a training script."""

from lockstep.testing.audit import audit as audit
