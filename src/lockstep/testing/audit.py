"""`audit`: tests that a training script trains correctly on several processes. The script need not
use lockstep."""

from __future__ import annotations

import os

from lockstep.audit.finding import Audit
from lockstep.audit.run import run_audit
from lockstep.audit.runner import AuditOptions
from lockstep.base.system import refuse_on_windows
from lockstep.base.temporary_folder import locked_folder
from lockstep.scripts.line import ScriptLine


def audit(
    script: str | os.PathLike[str],
    *arguments: str,
    nproc: int = 2,
    steps: int = 20,
    is_module: bool = False,
    hang_after_seconds: float = 60.0,
    timeout_seconds: float = 600.0,
) -> Audit:
    """Run `lockstep audit` on a script, or on a module with `is_module`, for your own test:

        def test_training_is_right():
            found = audit("train.py", "--epochs", "1", nproc=2)
            assert found.passed, found.findings

    The script runs in the working directory. `findings` have causes, lines and evidence. Raises
    `LaunchError` if the script is missing, fails before its first optimizer step, or never steps an
    optimizer.
    """
    refuse_on_windows("lockstep.testing.audit")
    line = ScriptLine(os.fspath(script), arguments, is_module)
    line.check()
    options = AuditOptions(
        line=line,
        processes=nproc,
        steps=steps,
        hang_after_seconds=hang_after_seconds,
        timeout_seconds=timeout_seconds,
    )
    with locked_folder("lockstep-audit-") as folder:
        return run_audit(options, folder)
