"""The processes of `lockstep.testing.pool`: a nursery that imports torch once, and the workers that
it forks. The nursery runs no tensor operation and starts no thread, because only such a process is
safe to fork. A worker ends after one run, so that no state reaches the next run."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.base.errors import UserError
from lockstep.base.garbage import freeze_for_good
from lockstep.comm.mesh import forget_meshes
from lockstep.recipe.code import texts
from lockstep.testing import leaks
from lockstep.testing.huge_pages import move_into_huge_pages

if TYPE_CHECKING:
    from lockstep.base.torch_private import TCPStore

PACKET_BYTES = 1 << 17
MOST_WORKERS = 100
# Importing torch._dynamo takes about a second, and the first optimizer of a process imports it (see
# torch._compile).
PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
)
# The kinds of resources that belong to one worker, which it checks for leaks itself. Files in
# /dev/shm and in the temporary folder, which all ranks share, are left to the test's process.
PRIVATE_KINDS: tuple[leaks.Kind, ...] = ("process", "thread", "port", "descriptor", "environment")
# The signal at which a worker writes the stacks of its threads. Not SIGUSR1 or SIGUSR2, which Slurm
# and libraries use.
DUMP_SIGNAL = signal.SIGRTMIN + 7
# The first byte of a worker's message to the pool: it has joined the process group, the function's
# result, it has left the group, or an error.
JOINED, RESULT, LEFT, FAILED = b"J", b"R", b"L", b"F"
MASTER_ADDRESS = "127.0.0.1"
RUNS_BEFORE_MOVE = 10
"""Number of runs of the test pool after which its memory is moved into huge pages. Huge pages make
the pool's later forks faster."""
# Seconds by which the process group's timeout exceeds the pool's, so that a hanging run always ends
# with its stacks.
LONGER_SECONDS = 5.0
FREED_SECONDS = 10.0
"""Time for a worker's threads to end and for Gloo to close its sockets, on a busy host."""


def nursery(control_descriptor: int, preload: Iterable[str]) -> None:
    """Import the modules that workers need. Fork and reap workers on request, until the control
    socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the pool handles Ctrl-C
    control = socket.socket(fileno=control_descriptor)
    for name in (*PRELOADED, *preload):
        importlib.import_module(name)
    _warm_up()
    children: set[int] = set()
    runs = 0
    try:
        control.send(b"ready")
        while packet := _next(control):
            _answer(control, children, *packet)
            runs += not children
            if runs == RUNS_BEFORE_MOVE and not children:
                move_into_huge_pages()
    except BrokenPipeError:
        pass  # the parent has ended
    for child in children:
        kill_group(child)
    os._exit(0)


def _next(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 2 * MOST_WORKERS)
    return (json.loads(packet), descriptors) if packet else None


def _answer(
    control: socket.socket, children: set[int], request: dict[str, Any], descriptors: list[int]
) -> None:
    if request["do"] == "fork":
        answer = {"processes": _fork(control, descriptors, request)}
        children.update(answer["processes"])
    else:
        answer = {
            "statuses": [
                os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in request["processes"]
            ]
        }
        children.difference_update(request["processes"])
    control.send(json.dumps(answer).encode())


def kill_group(process: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def import_for(name: str, file: str | None) -> ModuleType:
    """Import a module from `file`, even if the import system cannot find the module's name
    (pytest's importlib mode)."""
    module = sys.modules.get(name)
    if module is None:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if file is None or not name.startswith(str(error.name)):
                raise
    if file is None or (
        module is not None
        and os.path.samefile(getattr(module, "__file__", None) or os.devnull, file)
    ):
        if module is None:
            raise ModuleNotFoundError(name)
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{name} in {file}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loopback_store() -> TCPStore:
    """Return the server of a TCPStore on the loopback interface only. By default, TCPStore listens
    on every IPv6 interface, and looks up ::ffff:127.0.0.1 by DNS. Each client waits five seconds if
    the DNS lookup is not answered."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not in its __all__

    listener = socket.create_server((MASTER_ADDRESS, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        MASTER_ADDRESS, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _warm_up() -> None:
    import torch

    torch.set_num_threads(1)
    # libuv keeps a pipe after its first use; use it now, so that it does not count as a leak of a
    # run
    loopback_store()


def _fork(control: socket.socket, descriptors: list[int], request: dict[str, Any]) -> list[int]:
    sys.path[:] = request["path"]
    loaded = len(sys.modules)
    if request["module"] != "__main__":
        try:
            import_for(request["module"], request["file"])
        except BaseException:  # a worker that imports it gets the same error, and reports it
            sys.modules.pop(request["module"], None)
    if request["module"] == "__main__" or len(sys.modules) != loaded:
        texts.cache_clear()
    if request["module"] != "__main__":
        # Called before the fork: in a worker, it would copy the 4,000 memory pages of all modules.
        texts()
    # otherwise garbage collection in a worker would copy every memory page of the imported modules
    freeze_for_good()
    sys.stdout.flush()
    sys.stderr.flush()
    processes = []
    pairs = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    for pipe, dump in pairs:
        process = os.fork()
        if process == 0:
            try:
                control.close()
                for other in descriptors:
                    if other not in (pipe, dump):
                        os.close(other)
                _serve(Connection(pipe), dump)
            finally:
                os._exit(1)
        with contextlib.suppress(OSError):  # the worker may have done so itself, or have ended
            os.setpgid(process, process)
        processes.append(process)
    for descriptor in descriptors:
        os.close(descriptor)
    return processes


def _serve(pipe: Connection, dump_descriptor: int) -> None:
    """Join the process group, call the test's function, and destroy the group. Send a message to
    the pool after each action, and wait for all ranks."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The signal writes all stacks; its default action then ends the process, so the sender knows
    # that the dump is complete.
    faulthandler.enable(file=dump_descriptor)
    faulthandler.register(DUMP_SIGNAL, file=dump_descriptor, all_threads=True, chain=True)
    task = json.loads(pipe.recv_bytes())
    _set_environment(task)
    try:
        function, arguments = _load(task, pipe.recv_bytes())
        leave = _join(task)
        _wait_for_all_ranks(pipe, JOINED)
        payload = pickle.dumps(function(*arguments))
    except BaseException as error:
        _answer_failure(pipe, error)
        return
    del function, arguments
    _wait_for_all_ranks(pipe, RESULT + payload)
    try:
        left = leave()
    except BaseException as error:
        _answer_failure(pipe, error)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(LEFT + json.dumps(left).encode())
    os._exit(0)


def _wait_for_all_ranks(pipe: Connection, answer: bytes) -> None:
    pipe.send_bytes(answer)
    pipe.recv_bytes()


def _set_environment(task: dict[str, Any]) -> None:
    import torch

    rank, world_size = str(task["rank"]), str(task["world_size"])
    os.environ.clear()
    os.environ.update(task["environment"])
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size
    )
    os.environ.update(
        MASTER_ADDR=MASTER_ADDRESS,
        MASTER_PORT=str(task["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    # Otherwise a training would divide all cores among the ranks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("LOCKSTEP_LAUNCHER", "spawn")
    os.chdir(task["folder"])
    torch.set_num_threads(1)
    # torch.manual_seed would also record the stack, for a GPU: 460 page faults
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _load(task: dict[str, Any], payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if task["module"] == "__main__":
        main = ModuleType("__mp_main__")
        main.__dict__.update(runpy.run_path(task["file"], run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    else:
        import_for(task["module"], task["file"])
    function, arguments = pickle.loads(payload)
    return function, arguments


def _join(task: dict[str, Any]) -> Callable[[], list[str]]:
    """Create the default process group. Return a function that destroys the process group and
    describes the resources that the worker has leaked."""
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not in its __all__

    before = leaks.take(PRIVATE_KINDS) if task["check_leaks"] else None
    timeout = timedelta(seconds=task["timeout_seconds"] + LONGER_SECONDS)
    store = TCPStore(MASTER_ADDRESS, task["port"], None, False, timeout)
    distributed.init_process_group(
        "gloo", store=store, rank=task["rank"], world_size=task["world_size"], timeout=timeout
    )
    del store

    def leave() -> list[str]:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        forget_meshes()
        return [] if before is None else leaks.remaining(before, timeout_seconds=FREED_SECONDS)

    return leave


def _answer_failure(pipe: Connection, error: BaseException) -> None:
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without this module's own frame
    report = {
        "time": time.monotonic_ns(),
        "text": "".join(traceback.format_exception(error)),
        "error": _pickled(error).hex() if isinstance(error, UserError) else None,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(FAILED + json.dumps(report).encode())
    # wait until the pool kills this process: if its sockets closed before, other ranks would report
    # lost connections
    pipe.poll(None)


def _pickled(error: UserError) -> bytes:
    """Pickle the error. If pickling fails, pickle the error's type and text."""
    try:
        payload = pickle.dumps(error)
        if str(pickle.loads(payload)) == str(error):
            return payload
    # pickling calls its constructor and reads its attributes, which may raise anything
    except Exception:
        pass
    return pickle.dumps((type(error), str(error)))
