"""For tests, the package's own and yours: `pool` runs functions on several ranks, `leaks` finds what code left behind."""
