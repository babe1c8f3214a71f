"""Test support for the package and its users: `pool` runs functions on several ranks, `leaks` finds leaks."""
