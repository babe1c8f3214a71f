"""Checks of environment variables that slow training down or break it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.check_result import CheckResult

_ON = ("1", "true", "yes", "on", "y", "t")


@dataclass(frozen=True, slots=True)
class _CostlyVariable:
    name: str
    values: tuple[str, ...]
    """In lower case. Empty: any."""
    verdict: Literal["slow", "failed"]
    why: str
    remedy: str = "unset it, unless you are debugging"


_COSTLY_VARIABLES = (
    _CostlyVariable(
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        "slow",
        "every kernel waits for the one before: nothing overlaps",
    ),
    _CostlyVariable(
        "NCCL_DEBUG",
        ("info", "trace"),
        "slow",
        "NCCL logs every communicator, and with TRACE every call",
        "NCCL_DEBUG=WARN",
    ),
    _CostlyVariable(
        "NCCL_P2P_DISABLE",
        _ON,
        "slow",
        "GPUs of one machine exchange through host memory, not directly by NVLink or PCIe",
    ),
    _CostlyVariable(
        "NCCL_SHM_DISABLE",
        _ON,
        "slow",
        "GPUs without peer-to-peer access exchange through the network stack",
    ),
    _CostlyVariable(
        "NCCL_IB_DISABLE",
        _ON,
        "slow",
        "NCCL uses TCP instead of InfiniBand or RoCE",
        "unset it, unless the machine has neither",
    ),
    _CostlyVariable(
        "NCCL_ALGO", (), "slow", "NCCL no longer chooses the best one for each size and topology"
    ),
    _CostlyVariable(
        "NCCL_PROTO", (), "slow", "NCCL no longer chooses the best one for each size and topology"
    ),
    _CostlyVariable("TORCH_NCCL_BLOCKING_WAIT", _ON, "slow", "the CPU blocks on every collective"),
    _CostlyVariable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ("0",),
        "failed",
        "a rank whose peer has died waits for ever",
        "unset it",
    ),
    _CostlyVariable(
        "TORCH_DISTRIBUTED_DEBUG",
        ("detail",),
        "slow",
        "an extra collective before each one compares what the ranks call",
    ),
    _CostlyVariable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _ON,
        "slow",
        "every tensor is allocated by the driver, which waits for the GPU",
    ),
    _CostlyVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ("1",),
        "slow",
        "communication waits for computation: FSDP2 cannot overlap the two",
        "unset it",
    ),
    _CostlyVariable(
        "OMP_WAIT_POLICY",
        ("active",),
        "slow",
        "waiting threads keep the cores of other processes busy",
        "unset it",
    ),
    _CostlyVariable(
        "KMP_BLOCKTIME",
        ("infinite",),
        "slow",
        "waiting threads keep the cores of other processes busy",
        "unset it",
    ),
    _CostlyVariable(
        "PYTHONDEVMODE",
        ("1",),
        "slow",
        "Python runs its debug checks, also on every memory allocation",
    ),
)
_PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
"""Variables that bind the threads of every process to the same cores."""
_LAUNCHER_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
)
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
_RELEVANT_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "OMP_",
    "MKL_",
    "CUDA_DEVICE",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "FI_",
    "UCX_",
)


def environment_checks(environ: Mapping[str, str], *, nproc: int) -> list[CheckResult]:
    """Return a result for each harmful variable, or one `ok`. `nproc`: processes of this
    machine."""
    checks = [
        _check(
            variable.name, environ[variable.name], variable.verdict, variable.why, variable.remedy
        )
        for variable in _COSTLY_VARIABLES
        if environ.get(variable.name, "")
        and (not variable.values or environ[variable.name].lower() in variable.values)
    ]
    if nproc > 1:
        why = f"all {nproc} processes of this machine bind their threads to the same cores"
        checks += [
            _check(name, environ[name], "slow", why, "unset it")
            for name in _PINNING
            if environ.get(name)
        ]
    left = [name for name in _LAUNCHER_VARIABLES if name in environ]
    if left:
        why = (
            "left by a launcher: a script started with python would wait for other ranks, which do"
            " not exist"
        )
        remedy = f"unset {' '.join(left)}"
        checks.append(
            _check(
                ", ".join(left), ", ".join(environ[name] for name in left), "failed", why, remedy
            )
        )
    proxies = [name for name in _PROXIES if environ.get(name)]
    if proxies:
        why = (
            "checkpoints on object stores go through this proxy, unless NO_PROXY names their server"
        )
        checks.append(CheckResult("environment", proxies[0], "ok", f"{environ[proxies[0]]}: {why}"))
    if not checks:
        found = "none is set that slows training down or breaks it"
        checks.append(CheckResult("environment", "variables", "ok", found))
    return checks


def _check(
    name: str, value: str, verdict: Literal["slow", "failed"], why: str, remedy: str
) -> CheckResult:
    return CheckResult("environment", name, verdict, f"is {value}: {why}", remedy)


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that should be the same on all machines."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_RELEVANT_PREFIXES) and not name.endswith("_SOCKET_IFNAME")
    }


def variable_differences(
    machines: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> list[CheckResult]:
    """Return a result for each relevant variable that differs between machines."""
    checks = []
    for name in sorted({name for environ in environments for name in environ}):
        values = [environ.get(name, "(unset)") for environ in environments]
        if len(set(values)) > 1:
            other = next(number for number, value in enumerate(values) if value != values[0])
            text = (
                f"is {values[0]} on {machines[0]} and {values[other]} on {machines[other]}: ranks"
                " may choose different transports"
            )
            checks.append(
                CheckResult(
                    "environment", name, "failed", text, "set it to the same value on all machines"
                )
            )
    return checks
