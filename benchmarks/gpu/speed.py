"""A GPT of 354 million parameters: `ls.train` beside a loop by hand, in speed, memory, waits of the
host, and a checkpoint's stall. Also the script that `lockstep plan` predicts."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from models import GPT, TINY, Tokens, cross_entropy, recipe
from results import CPU, HERE, attempt, folder, lockstep, report, rows_of
from torch import Tensor, nn

import lockstep as ls
from lockstep.logging.flops import peak_of

SIZE = (
    TINY
    if CPU
    else {"layers": 24, "width": 1024, "heads": 16, "context": 1024, "vocabulary": 50304}
)
GLOBAL, MICRO, WARMUP, STEPS = (4, 2, 2, 4) if CPU else (32, 16, 6, 20)
PLANS = {
    "eager": "replicate=1",
    "compile": "replicate=1,compile=yes",
    "bitwise": "replicate=1,numerics=bitwise",
}


def large(**changes: Any) -> ls.Recipe:
    given = {
        "size": SIZE,
        "dropout": 0.0,
        "samples": 512,
        "global_batch": GLOBAL,
        "microbatch": MICRO,
    }
    return recipe(**{**given, "steps": WARMUP + STEPS, "precision": "bf16", **changes})


def flops_a_token(parameters: int) -> float:
    """Return the FLOPs of a forward and a backward (Chowdhery et al., PaLM, 2022, appendix B),
    attention unmasked."""
    without_positions = parameters - SIZE["context"] * SIZE["width"]
    return 6 * without_positions + 12 * SIZE["layers"] * SIZE["width"] * SIZE["context"]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(ls.Hook):
    """The seconds of a step after the first ones, and of the first."""

    def on_start(self, run: ls.Run) -> None:
        self.device, self.started = run.context.device, time.perf_counter()

    def after_step(self, run: ls.Run) -> None:
        if run.step == 1:
            self.first = now(self.device) - self.started
        if run.step == WARMUP:
            self.began = now(self.device)
        if run.step == WARMUP + STEPS:
            self.seconds = (now(self.device) - self.began) / STEPS
            self.parameters = sum(each.numel() for each in run.model.parameters())


def trained(mode: str) -> tuple[float, float, int]:
    clock = Clock()
    ls.train(
        large(),
        plan=PLANS[mode],
        run_dir=folder(f"speed-{mode}") / "run",
        hooks=[clock],
        log_every=10,
    )
    return clock.seconds, clock.first, clock.parameters


def by_hand(mode: str, device: torch.device) -> tuple[float, float, int]:
    torch.manual_seed(0)
    model = GPT(**SIZE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    forward = torch.compile(model) if mode == "compile" else model
    data, generator = (
        Tokens(SIZE["vocabulary"], SIZE["context"], 512),
        torch.Generator().manual_seed(1),
    )

    def following() -> Tensor:
        batch = data.__getitems__(torch.randint(len(data), (MICRO,), generator=generator).tolist())
        return batch if CPU else batch.pin_memory().to(device, non_blocking=True)

    started = began = time.perf_counter()
    batch, first = following(), 0.0
    for step in range(WARMUP + STEPS):
        if step == 1:
            first = now(device) - started
        if step == WARMUP:
            began = now(device)
        for _ in range(GLOBAL // MICRO):
            with torch.autocast(device.type, torch.bfloat16):
                loss = cross_entropy(forward(batch[:, :-1]), batch) / (GLOBAL // MICRO)
            batch = following()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            loss.item()
    return (now(device) - began) / STEPS, first, sum(each.numel() for each in model.parameters())


def speed(side: str, mode: str) -> None:
    """Tokens a second, MFU and memory of one side: `lockstep` or `hand`."""
    device = torch.device("cpu" if CPU else "cuda")
    seconds, first, parameters = by_hand(mode, device) if side == "hand" else trained(mode)
    tokens = GLOBAL * SIZE["context"] / seconds
    peak = None if CPU else peak_of(device, "bf16")
    mfu = None if peak is None else round(tokens * flops_a_token(parameters) / peak, 4)
    gb = (
        {}
        if CPU
        else {
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
    )
    report(
        f"{side} {mode}",
        step_seconds=seconds,
        tokens_per_second=round(tokens),
        mfu=mfu,
        parameters=parameters,
        first_step_seconds=round(first, 2),
        **{name: round(value, 2) for name, value in gb.items()},
        short=(
            f"{seconds * 1e3:.1f} ms a step, MFU {mfu}, {gb.get('peak_gb', 0):.1f} GB, first step"
            f" {first:.1f} s"
        ),
    )


def plan() -> None:
    """What `lockstep plan` says of the training that `speed` measures. It needs no GPU."""
    name = "" if CPU else torch.cuda.get_device_name()
    device = next(
        (
            each
            for each in ("H200", "H100", "A100-80GB", "A100-40GB", "L40S", "A10G")
            if each.split("-")[0] in name
        ),
        "H100",
    )
    given = [str(HERE / "speed.py"), "--plans", *PLANS.values()]
    began = time.monotonic()
    status, text, _ = lockstep("plan", "--on", f"1 x {device}", "--json", *given)
    try:
        plans = json.loads(text[text.index("{") :])["plans"]
    except (ValueError, KeyError):
        report("lockstep plan", ok=False, status=status, error=text[-800:])
        return
    brief = [
        {name: value for name, value in each.items() if isinstance(value, str | int | float)}
        for each in plans
    ]
    report(
        "lockstep plan",
        ok=status == 0,
        device=device,
        seconds=round(time.monotonic() - began, 1),
        plans=brief,
    )


# Waits of the host

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Profiled(ls.Hook):
    """Profiles steps that log nothing: those after `first` to `last` steps."""

    def __init__(self, first: int = 5, last: int = 7) -> None:
        self.profiler, self.first, self.last = profiler(), first, last

    def before_step(self, run: ls.Run) -> None:
        if run.step == self.first:
            self.profiler.start()
        if run.step == self.last + 1:
            self.profiler.stop()


def profiler() -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU] if CPU else [kinds.CPU, kinds.CUDA])


def report_waits(name: str, profiled: torch.profiler.profile, steps: int = 3) -> None:
    """Report the calls into CUDA, and what ran on the device, per step. The profiler's own end
    waits once."""
    calls: dict[str, float] = {}
    for event in profiled.events():
        if event.name.startswith("cu") and event.device_type.name == "CPU":
            calls[event.name] = calls.get(event.name, 0) + 1 / steps
    kernels = sum(event.device_type.name == "CUDA" for event in profiled.events()) / steps
    waits = {
        call: round(count, 2)
        for call, count in calls.items()
        if call.startswith(WAITS) and "Async" not in call
    }
    waits["cudaDeviceSynchronize"] = round(waits.get("cudaDeviceSynchronize", 0) - 1 / steps, 2)
    waits = {call: count for call, count in waits.items() if count > 0}
    rounded = {call: round(count, 2) for call, count in sorted(calls.items())}
    short = ", ".join(f"{call[4:]} {count}" for call, count in waits.items()) or "none"
    report(
        f"host waits in a step: {name}",
        waits=waits,
        calls=rounded,
        kernels=round(kernels, 1),
        short=short,
    )


def times(mode: str) -> None:
    """The kernels that take the most time in a step of the large model."""
    hook = Profiled(first=6, last=6)
    ls.train(
        large(steps=8),
        plan=PLANS[mode],
        run_dir=folder(f"times-{mode}") / "run",
        hooks=[hook],
        log_every=100,
    )
    spent: dict[str, list[float]] = {}
    for event in hook.profiler.events():
        if event.device_type.name == "CUDA":
            taken = spent.setdefault(event.name[:120], [0.0, 0])
            taken[0] += event.time_range.elapsed_us() / 1000
            taken[1] += 1
    most = sorted(spent.items(), key=lambda each: -each[1][0])[:40]
    rounded = {kernel: [round(ms, 3), calls] for kernel, (ms, calls) in most}
    total = sum(ms for ms, _ in spent.values())
    report(f"device time of a step: {mode}", ms=total, kernels=rounded, short=f"{total:.1f} ms")


def profiled_training(name: str, plan: str, **changes: Any) -> None:
    hook = Profiled()
    where = folder(f"waits-{name.replace(' ', '-')}")
    ls.train(
        recipe(steps=12, **changes), plan=plan, run_dir=where / "run", hooks=[hook], log_every=100
    )
    report_waits(name, hook.profiler)


def profiled_by_hand() -> None:
    device = torch.device("cpu" if CPU else "cuda")
    given = recipe()
    model: nn.Module = given.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    profiled = profiler()
    for step in range(8):
        if step == 5:
            profiled.start()
        for micro in range(4):
            batch = given.data.__getitems__(list(range(4 * micro, 4 * micro + 4)))
            batch = batch if CPU else batch.pin_memory().to(device, non_blocking=True)
            (cross_entropy(model(batch[:, :-1]), batch) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    profiled.stop()
    report_waits("by hand", profiled)


def waits() -> None:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "fast": ("", {}),
        "bitwise": ("numerics=bitwise", {}),
        "not fused": ("", {"fused": False}),
        "bf16": ("", {"precision": "bf16"}),
        "fp16": ("", {"precision": "fp16"}),
    }
    for name, (plan, changes) in cases.items():
        attempt(
            name,
            lambda name=name, plan=plan, changes=changes: profiled_training(name, plan, **changes),
        )
    attempt("by hand", profiled_by_hand)


# Checkpoints


def stall() -> None:
    """How long a save stops training, beside the time that its bytes take over PCIe."""
    where = folder("stall") / "run"
    steps = WARMUP + STEPS
    ls.train(
        large(steps=steps),
        plan="",
        run_dir=where,
        saving=ls.Saving(every=max(2, steps // 3)),
        log_every=10,
    )
    saves = [row for row in rows_of(where / "events.jsonl") if row["event"] == "checkpoint-saved"]
    stopped = [row["stopped_seconds"] for row in saves]
    size = max(
        sum(file.stat().st_size for file in each.rglob("*"))
        for each in (where / "checkpoints").iterdir()
    )
    if CPU:
        report("checkpoint stall", ok=None, stopped_seconds=stopped, bytes=size)
        return
    rate = pcie_rate()
    ratio = stopped[-1] / (size / rate)
    report(
        "checkpoint stall",
        ok=ratio <= 1.2,
        stopped_seconds=stopped,
        bytes=size,
        pcie_gb_s=round(rate / 1e9, 1),
        ratio=round(ratio, 2),
        short=f"{stopped[-1]:.3f} s for {size / 1e9:.2f} GB: {ratio:.2f} x PCIe",
    )


def pcie_rate() -> float:
    """Return the bytes a second of a copy into pinned memory."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(3):
        began = now(source.device)
        pinned.copy_(source, non_blocking=True)
        times.append(now(source.device) - began)
    return source.numel() / min(times)


if __name__ == "__main__":  # for lockstep plan
    ls.train(large(), run_dir=os.path.join(os.environ.get("GPU_CHECK_FOLDER", "/tmp"), "planned"))
