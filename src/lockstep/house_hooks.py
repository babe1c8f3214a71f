"""lockstep's hooks, in the order in which they are called, with the reason for the position of
each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.base import accelerator
from lockstep.base.errors import LossError
from lockstep.hooks.carried_variables import CarriedVariables
from lockstep.hooks.checkpointing import Checkpointing
from lockstep.hooks.expert_loads import ExpertLoads
from lockstep.hooks.gradient_checksum import GradientChecksum
from lockstep.hooks.hang.watchdog import HangHook
from lockstep.hooks.loss_check import CarriedState, LossCheck
from lockstep.hooks.memory_images import MemoryImages
from lockstep.hooks.metrics import EvaluationHook, Metrics
from lockstep.hooks.out_of_memory import OutOfMemory
from lockstep.hooks.preemption import Preemption
from lockstep.hooks.profiling.profiler import Profiler
from lockstep.hooks.profiling.trace import profiled_steps
from lockstep.hooks.recomputation_audit import RecomputationAudit
from lockstep.hooks.replica_audit import ReplicaAudit
from lockstep.hooks.stragglers import Stragglers
from lockstep.launch.failures import error_details
from lockstep.launch.termination import Preempted, Termination
from lockstep.opening import Opened
from lockstep.options import WatchdogTimeouts
from lockstep.recipe.recipe import Evaluation
from lockstep.saving import check_out_of_memory
from lockstep.training.deterministic import FillsInFirstStep
from lockstep.training.hook import Hook
from lockstep.training.recovery import Recovery
from lockstep.training.run import Run


class HouseHooks:
    """The hooks of one run on one rank. The user's hooks are called between lockstep's hooks."""

    def __init__(
        self,
        opened: Opened,
        termination: Termination,
        *,
        hooks: Sequence[Hook],
        evaluations: Mapping[str, Evaluation],
        recovery: Recovery | None = None,
    ) -> None:
        environment, request, bare = (
            opened.environment,
            opened.request,
            opened.context.overrides.bare,
        )
        # hooks of commands such as `lockstep verify` see the state before hooks of the user change
        # it
        user_hooks = [*opened.hooks, *hooks]
        setting = check_out_of_memory(
            environment.out_of_memory or "retry", "LOCKSTEP_OUT_OF_MEMORY"
        )
        timeouts = (
            None if bare else WatchdogTimeouts.parse(environment.hang_after, environment.on_hang)
        )
        steps = None if environment.profile is None else profiled_steps(environment.profile)
        audit = ReplicaAudit(every=environment.compare_every or 0, hooks=hooks)
        self._is_reported = environment.launcher in ("lockstep", "spawn")  # by the launcher
        self.metrics = Metrics()
        self.loss_check = LossCheck()
        self.evaluation = EvaluationHook(evaluations, self.metrics) if evaluations else None
        self.checkpointing = Checkpointing(
            request.saving,
            request.resume,
            request.checkpoints(opened.context),
            request.allow_change,
            audit,
        )
        self.out_of_memory = OutOfMemory(
            opened.given_plan,
            opened.taken_fallbacks,
            setting,
            is_restarted=environment.launcher == "lockstep",
        )
        self.hang = HangHook(timeouts, opened.context, self.checkpointing.rescue, recovery)
        evaluating = [] if self.evaluation is None else [self.evaluation]
        on_accelerator = accelerator.is_accelerator(opened.context.device)
        fills = [FillsInFirstStep()] if opened.context.bitwise and on_accelerator else []
        if bare:
            self.in_order: list[Hook] = [
                *fills,
                *user_hooks,
                *evaluating,
                GradientChecksum(),
                self.metrics,
                Preemption(termination, stop_at=environment.stop_at),
            ]
            return
        self.in_order = [
            # Watches forwards if the loss cannot be tried.
            CarriedState(),
            # The same for variables of the script's loop.
            CarriedVariables(),
            # Stops torch from filling new tensors.
            *fills,
            # Starts a trace before any other hook of the step, and ends it before lockstep's own
            # work between steps.
            *([] if steps is None else [Profiler(steps)]),
            # The user's hooks see the state that the script has left.
            *user_hooks,
            # Tries the loss on the first microbatch, which is fetched once the user's hooks have
            # set what the data depend on.
            self.loss_check,
            # Evaluates after the user's hooks may have changed the model, and before a save, which
            # stores the metrics.
            *evaluating,
            # Adds its numbers to the line that `Metrics` writes.
            Stragglers(),
            # Likewise.
            ExpertLoads(),
            # Likewise.
            GradientChecksum(),
            # Detects a loss that is not finite before the step is compared or saved.
            self.metrics,
            # Detects a replica that differs before a save.
            audit,
            # Ends the run before a wrong gradient is used.
            RecomputationAudit(self.checkpointing, recovery),
            # Writes the next plan before the emergency save, which may take long, or fail.
            self.out_of_memory,
            # Saves the state that all hooks before it have left.
            self.checkpointing,
            # Copies the same state as a checkpoint.
            MemoryImages(recovery),
            # Ends the run once it is saved.
            Preemption(termination, stop_at=environment.stop_at),
        ]

    def end_with(self, run: Run, error: BaseException) -> None:
        """Record the error that ends the run, call the hooks, and add a remedy to the error."""
        if isinstance(error, Preempted):
            run.event("preempted", reason=error.reason)
            if not self._is_reported:
                run.context.recorder.message(
                    f"saved after step {run.step} and ended ({error.reason}); a start with the same"
                    f" run directory, {run.context.run_dir}, resumes from there"
                )
            return
        run.event("run-failed", **error_details(error))
        run.training.hooks.call_every("on_error", run, error)
        is_kept = not run.context.overrides.bare
        if is_kept and isinstance(error, LossError) and error.not_finite_in is not None:
            error.add_note(
                f"lockstep blame {run.context.run_dir} looks for the samples and the layer"
            )
        self.out_of_memory.advise(run, error, saved=self.checkpointing.rescued)
