"""Trains the small GPT under several plans, one after another, in the processes of one launch.

    lockstep run --nproc N bits.py PLAN[@precision][@setting=value] ... --folder FOLDER

Rank 0 reports the fingerprint of each.
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from models import Fault, KillOnce, Raise, Sleep, recipe
from results import report

import lockstep as ls


def settings_of(given: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for each in given:
        name, _, value = each.partition("=")
        settings.update({name: int(value)} if value else {"precision": name})
    return settings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--save-every", type=int)
    for fault in ("kill", "raise", "sleep"):
        parser.add_argument(f"--{fault}", metavar="STEP,RANK")
    options = parser.parse_intermixed_args()
    saving = ls.Saving(every=options.save_every) if options.save_every else None
    for number, given in enumerate(options.plans):
        plan, *settings = given.split("@")
        hooks: list[Fault] = []
        if options.kill and number == 0:
            step, rank = map(int, options.kill.split(","))
            hooks.append(KillOnce(step, rank, options.folder / "killed"))
        for kind, text in ((Raise, getattr(options, "raise")), (Sleep, options.sleep)):
            if text:
                hooks.append(kind(*map(int, text.split(","))))
        began = time.monotonic()
        try:
            result = ls.train(
                recipe(**settings_of(settings)),
                plan=plan,
                run_dir=options.folder / f"run-{number}",
                hooks=hooks,
                log_every=4,
                saving=saving,
            )
        except Exception as error:
            on_purpose = bool(hooks)
            report(
                given,
                ok=None if on_purpose else False,
                error=f"{type(error).__name__}: {error}"[:600],
            )
            if on_purpose or torch.distributed.is_initialized():
                raise
            traceback.print_exc()
            continue
        if result.rank == 0:
            report(
                given,
                fingerprint=result.fingerprint[:16],
                loss=result.loss,
                plan=result.plan,
                peak_mb=(
                    torch.cuda.max_memory_allocated() >> 20 if torch.cuda.is_available() else None
                ),
                seconds=round(time.monotonic() - began, 2),
                events=[event.name for event in result.events][:20],
            )


if __name__ == "__main__":
    main()
