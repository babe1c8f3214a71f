"""The entry point of `lockstep`, which handles Ctrl-C before it imports other modules."""

from __future__ import annotations

from lockstep.base.interrupt import interrupts_end


def main() -> None:
    with interrupts_end():
        from lockstep.cli.main import main as run
    run()
