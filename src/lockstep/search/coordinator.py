"""The main loop of a hyper-parameter search."""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from lockstep.base.errors import LaunchError, UserError, named_error, say
from lockstep.base.system import signals, signals_handled
from lockstep.launch.recovery.channel import Channel
from lockstep.launch.termination import tell
from lockstep.options import RunOptions
from lockstep.recipe.parameters import Parameter
from lockstep.scripts.process import never_trained
from lockstep.search.database import reachable
from lockstep.search.fork_server import ENDING, ForkServer, LaunchRequest
from lockstep.search.outcome import FailuresAlike, TrialOutcome, finished_outcome, outcome_of
from lockstep.search.population import CHANGEABLE
from lockstep.search.proposals import Proposals
from lockstep.search.request import SearchRequest, TrialRequest
from lockstep.search.slots import TrialSlot
from lockstep.search.study import ClaimedTrial, TrialStorage, check_parameters

POLL_SECONDS = 0.2
IDLE_SECONDS = 0.5


@dataclass(slots=True)
class RunningTrial:
    claimed: ClaimedTrial
    slot: TrialSlot
    channel: Channel
    is_probe: bool
    """True if the process only reports the hyper-parameters of the script, and does not train."""
    has_opened: bool = False
    began: float = field(default_factory=time.monotonic)


class Search:
    def __init__(
        self,
        request: SearchRequest,
        storage: TrialStorage,
        server: ForkServer,
        slots: Sequence[TrialSlot],
        processes: int,
        on_end: Callable[[int], None],
    ) -> None:
        self._request, self._storage, self._server = request, storage, server
        self._processes, self._on_end = processes, on_end
        self.proposals = Proposals(request, storage)
        self._free = list(slots)
        self._running: dict[int, RunningTrial] = {}
        self._failures = FailuresAlike()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server.channel, selectors.EVENT_READ)
        self._error: UserError | None = None
        self._ended_by: str | None = None
        self._signals = 0
        self._looked = self._claims_from = 0.0
        limit = math.inf if request.timeout_seconds is None else request.timeout_seconds
        self._until = time.monotonic() + limit
        self._ends_early = False

    def run(self) -> str | None:
        numbers = signals("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
        with signals_handled(numbers, self._on_signal), reachable(self._storage.url):
            while True:
                self._storage.note_wanted(self.proposals.wanted)
                self._fill()
                if not self._running and (self._ends_early or self._is_done()):
                    break
                for key, _ in self._selector.select(POLL_SECONDS):
                    if key.fileobj is self._server.channel:
                        self._on_ended()
                        continue
                    running = self._running.get(key.data)
                    if running is not None and running.channel is key.fileobj:
                        self._on_message(running)
                self._end_in_time()
        if self._error is not None:
            raise self._error
        return self._ended_by

    def _is_done(self) -> bool:
        if time.monotonic() - self._looked < IDLE_SECONDS:
            return False
        self._looked = time.monotonic()
        return not self._storage.has_unfinished(self.proposals.wanted)

    def _fill(self) -> None:
        while self._free and not self._ends_early:
            if self._running and not self.proposals.are_known:
                return  # wait until the first trial has reported the script's parameters
            if time.monotonic() < self._claims_from:
                return
            claimed = self._storage.claim(self.proposals.ready)
            if claimed is None:
                self._claims_from = time.monotonic() + IDLE_SECONDS
                return
            self._begin(claimed)

    def _begin(self, claimed: ClaimedTrial) -> None:
        folder = self._storage.run_dir(claimed.number)
        done = finished_outcome(folder, self._request.metric) if claimed.is_resumed else None
        if done is not None:
            self._finish(claimed, done)
            return
        needs_values = claimed.number > 0 or self.proposals.need_probe
        is_probe = needs_values and not self.proposals.are_known
        self._start(claimed, self._free.pop(0), is_probe=is_probe)

    def _start(self, claimed: ClaimedTrial, slot: TrialSlot, *, is_probe: bool) -> None:
        folder = self._storage.run_dir(claimed.number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ENDING).unlink(missing_ok=True)
        is_member = self._request.sampler == "pbt" and not is_probe
        request = TrialRequest(
            calls="train" if is_probe else "install",
            metric=self._request.metric,
            can_be_pruned=self._request.pruner != "none",
            until=self.proposals.population.until(claimed.number) if is_member else None,
        )
        options = self._options(claimed, is_probe=is_probe)
        if is_member:
            self._go_on_from_parent(claimed)
            options = replace(
                options,
                save_every=str(self.proposals.population.segment),
                allow_change=options.allow_change | CHANGEABLE,
            )
        launch = LaunchRequest(
            number=claimed.number,
            folder=str(folder.absolute()),
            line=self._request.line.words,
            processes=1 if is_probe else self._processes,
            max_restarts=0 if is_probe else self._request.launch.max_restarts,
            options=options.to_environment(),
            request=request.as_json(),
            environment=slot.variables(os.environ),
        )
        channel = self._server.start(launch)
        self._selector.register(channel, selectors.EVENT_READ, claimed.number)
        self._running[claimed.number] = RunningTrial(claimed, slot, channel, is_probe)

    def _options(self, claimed: ClaimedTrial, *, is_probe: bool) -> RunOptions:
        given = self._request.launch.for_workers(default_run_dir="", now_seconds=time.time())
        values = {} if is_probe else self.proposals.values(claimed)
        assignments = (*given.set, *(f"{name}={value}" for name, value in values.items()))
        folder = str(self._storage.run_dir(claimed.number).absolute())
        return replace(given, run_dir=folder, default_run_dir=None, resume="auto", set=assignments)

    def _go_on_from_parent(self, claimed: ClaimedTrial) -> None:
        """Copy the parent trial's checkpoints into this trial's run directory, for population-based
        training."""
        parent = self.proposals.parent(claimed.number)
        folder = self._storage.run_dir(claimed.number)
        if parent is None or (folder / "checkpoints").exists():
            return
        claimed.trial.set_user_attr("parent", parent)
        shutil.rmtree(folder / "copied", ignore_errors=True)
        shutil.copytree(self._storage.run_dir(parent) / "checkpoints", folder / "copied")
        (folder / "copied").rename(folder / "checkpoints")

    def _on_message(self, running: RunningTrial) -> bool:
        message = running.channel.receive(0.0)
        if message is None:
            if running.channel.has_ended and running.channel in self._selector.get_map():
                self._selector.unregister(running.channel)
            return False
        match message["kind"]:
            case "opened":
                self._on_opened(running, message)
            case "refused":
                self._stop(LaunchError(message["reason"]))
            case "report":
                prune = self._storage.report(running.claimed, message["step"], message["value"])
                running.channel.send("answer", prune=prune)
        return True

    def _on_opened(self, running: RunningTrial, message: Mapping[str, Any]) -> None:
        """Handle the message that a trial's script has called `ls.train`. The parameters of the
        first trial become the search's parameters."""
        running.has_opened = True
        try:
            for name in ("every", "steps"):
                self._storage.note(name, message[name])
            known = self._storage.parameters
            if known is None:
                self._storage.note_parameters(message["parameters"])
                self.proposals.check()
            else:
                check_parameters(known, [Parameter.of(each) for each in message["parameters"]])
            self._storage.check_programs(message["programs"])
        except UserError as error:
            running.channel.send("answer", refused=str(error))
            self._stop(error)
            return
        if not running.is_probe:
            # give the first trial its values: it began before the script's parameters were known
            self.proposals.values(running.claimed)
            running.claimed.trial.set_user_attr("values", message["values"])
        running.channel.send("answer", refused=None)

    def _on_ended(self) -> None:
        message = self._server.channel.receive()
        if message is None:
            raise LaunchError(
                "the process that starts the trials has ended; was it killed? the same command"
                " continues"
            )
        running = self._running.pop(message["number"])
        while self._on_message(running):
            pass  # read the last messages
        running.channel.close()
        self._free.append(running.slot)
        folder = self._storage.run_dir(running.claimed.number)
        if running.is_probe and message["status"] == 0 and self._storage.parameters is not None:
            shutil.rmtree(folder)
            self._after_probe(running)
            return
        self._storage.note_seconds(running.claimed, time.monotonic() - running.began)
        outcome = outcome_of(folder, message["status"], self._request.metric)
        if outcome.is_mistake and running.claimed.number == 0:
            name, _, text = str(outcome.reason).partition(": ")
            self._stop(named_error(name, text, UserError) or UserError(text))
        elif message["status"] == 0 and not running.has_opened and outcome.state == "failed":
            needs = "a search needs the parameters of the recipe given to ls.train"
            self._stop(never_trained(self._request.line, "a call of ls.train", needs))
        if self._ends_early and outcome.state == "failed":
            # ended by a signal to the search, or by a mistake that every trial would repeat: the
            # trial is not counted as failed
            outcome = TrialOutcome(state="running")
        self._finish(running.claimed, outcome)

    def _after_probe(self, running: RunningTrial) -> None:
        if running.claimed.number < self.proposals.wanted and not self._ends_early:
            self._start(running.claimed, self._free.pop(), is_probe=False)
        else:
            self._storage.end(running.claimed, TrialOutcome(state="running"))

    def _finish(self, claimed: ClaimedTrial, outcome: TrialOutcome) -> None:
        self._storage.end(claimed, outcome)
        self._claims_from = 0.0
        if outcome.state != "running":
            self._on_end(claimed.number)
        if self._failures.note(outcome):
            folder = self._storage.run_dir(claimed.number)
            self._stop(
                LaunchError(
                    "the script is at fault: no trial has succeeded, and several have failed"
                    f" alike: {outcome.reason}; correct the script; what the last one printed is in"
                    f" {folder / 'output.txt'}"
                )
            )

    def _stop(self, error: UserError) -> None:
        """End the search with an error. Running trials save a checkpoint and end before the error
        is raised."""
        self._error = self._error or error
        self._ends_early = True
        self._server.signal(signal.SIGTERM)

    def _end_in_time(self) -> None:
        if time.monotonic() >= self._until and not self._ends_early:
            say("lockstep: the time of the search is over; its trials save and end")
            self._ends_early = True
            self._ended_by = "--timeout"
            self._server.signal(signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if number == signal.SIGINT and self._signals == 1:
            tell("interrupted: the trials save and end; Ctrl-C again ends them at once")
        self._ended_by = self._ended_by or signal.Signals(number).name
        self._ends_early = True
        self._server.signal(signal.SIGTERM if self._signals < 3 else signal.SIGKILL)
