"""The entry point `lockstep`. It imports almost nothing before it handles Ctrl-C."""

from __future__ import annotations

from lockstep.base.interrupt import interrupts_end


def main() -> None:
    with interrupts_end():
        from lockstep.cli.main import main as run
    run()
