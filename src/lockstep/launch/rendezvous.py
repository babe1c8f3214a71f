"""The rendezvous of a run: on one machine, or torch's rendezvous of several machines.

[Note: listening] On one machine, everything listens on loopback only: the store on a socket that is
bound here, Gloo and NCCL because of their interface variables. On several machines, the stores
listen on the address by which the machines reach each other, and Gloo and NCCL on its interface. A
store has no authentication: anyone who can connect may read and write it. Torch's rendezvous keeps
pickles in its store, so anyone who can connect to it can run code on the machines.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from lockstep.base.errors import LaunchError, say
from lockstep.base.torch_private import (
    judge_heartbeats_by,
    refresh_rendezvous_state_after,
    rendezvous_polls_every,
    skip_rendezvous_records,
)
from lockstep.launch.machines import Machines, address_on, address_towards, interface_of

JOIN_SECONDS = 600
NOTICE_SECONDS = 5
"""Time without an answer from another machine after which this machine prints that it is still
trying to connect."""
STORE_SILENCE_SECONDS = 10
"""Time without an answer from the rendezvous host after which it counts as lost."""
STORE_SECONDS = 10
"""Timeout of one request to the store. The machine that should write the key may be lost."""


def store_on(listener: socket.socket) -> TCPStore:
    """Make a TCPStore on the socket `listener`. Without a socket, a TCPStore would listen on all
    interfaces."""
    address, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=STORE_SECONDS)
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def host_store(machines: Machines, address: str) -> TCPStore | None:
    """Host the store at the IP address `address`. Returns None if the address belongs to another
    machine, or if another process hosts the store."""
    try:
        return store_on(socket.create_server((address, machines.port), family=family(address)))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and machines.node_rank == 0:
            raise LaunchError(
                f"{machines.option}: {address} is not an address of this machine, which has number"
                " 0; the other machines look for number 0 there; correct the address, or"
                " --node-rank"
            ) from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise LaunchError(
            f"{machines.option}: cannot listen there ({error.strerror}); it must be a free port of"
            " one of the machines; give another"
        ) from None


def connect_store(machines: Machines, address: str, own: str) -> TCPStore:
    """Connect to the store that another machine hosts at the IP address `address`. `own` is the
    address of this machine."""
    began = time.monotonic()
    has_said = False
    while True:
        try:
            socket.create_connection((address, machines.port), timeout=5).close()
            return TCPStore(
                address, machines.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS)
            )
        except OSError as error:
            waited = time.monotonic() - began
            tried = (
                f"tried {address} port {machines.port} from {own} on"
                f" {interface_of(own) or 'an interface without a name'}: {error}"
            )
            if waited > JOIN_SECONDS:
                raise LaunchError(
                    f"nobody at {machines.option} for {JOIN_SECONDS} s ({tried}); the same command"
                    " runs on that machine too, and keeps the rendezvous; start it there, or"
                    " correct the address, or let this machine reach that port"
                ) from None
            if waited > NOTICE_SECONDS and not has_said:
                say(
                    f"lockstep: no answer yet at {machines.option} ({tried}); goes on trying for"
                    f" {JOIN_SECONDS} s"
                )
                has_said = True
        time.sleep(0.5)


def set_tcp_timeouts(address: str, port: int) -> None:
    """Make the kernel close this process's connections to a silent host. Without the timeouts,
    torch would wait for a quarter of an hour, and ignore signals."""
    if sys.platform != "linux":
        return
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 2,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 2,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): STORE_SILENCE_SECONDS * 1000,
    }
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # not a connection, or already closed
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as each:
                if each.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = each.getpeername()
                if (peer[0].removeprefix("::ffff:"), peer[1]) == (address, port):
                    for (level, option), value in options.items():
                        each.setsockopt(level, option, value)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


LOOPBACK = "127.0.0.1"

LAST_CALL_SECONDS = 5.0
"""Time that a rendezvous waits for more machines after the minimum number has joined."""
RECOVERY_CALL_SECONDS = 0.5
"""Time that the rendezvous of a recovery in place waits for more machines. All machines join the
rendezvous of a recovery at about the same time."""
HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""Time without a heartbeat after which a machine counts as lost. A busy machine may pause for
seconds."""
STATE_SECONDS, RENDEZVOUS_POLL_SECONDS = 0.25, 0.1
"""Seconds between two reads of the rendezvous state, outside of a rendezvous and during one."""
ABLE_SECONDS = 30.0
TRIES = 10
REACH_SECONDS = 5.0
_RUN_ID = "lockstep"


class LoopbackRendezvous(RendezvousHandler):
    def __init__(self) -> None:
        self._run_id = f"lockstep-{secrets.token_hex(8)}"
        self._store: TCPStore | None = None
        self.interface: str | None = _loopback_interface()
        self.addresses = [LOOPBACK]

    def get_backend(self) -> str:
        return "lockstep-loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        try:
            socket.create_connection(listener.getsockname(), timeout=5).close()
        except OSError as error:  # TCPStore would try for a minute
            listener.close()
            raise LaunchError(
                f"{LOOPBACK} cannot be reached ({error.strerror or error}); the processes of one"
                " machine connect there; bring the loopback interface up (ip link set lo up)"
            ) from None
        self._store = store_on(listener)
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


class Silence:
    """Measures the time since the last heartbeat of each machine, by the clock of this machine.
    Time in which this machine or the store was stopped is not counted."""

    def __init__(self, own: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self._clock = own, clock
        self._looked = clock()
        self._heartbeats: Mapping[Any, datetime] = {}
        self._seconds: dict[Any, float] = {}

    def lost(self, heartbeats: Mapping[Any, datetime]) -> set[Any]:
        now = self._clock()
        passed, self._looked = min(now - self._looked, HEARTBEAT_SECONDS), now
        self._seconds = {
            machine: self._seconds[machine] + passed
            if self._heartbeats.get(machine) == heartbeat
            else 0.0
            for machine, heartbeat in heartbeats.items()
        }
        self._heartbeats = dict(heartbeats)
        return {
            machine
            for machine, seconds in self._seconds.items()
            if machine != self._own and seconds >= SILENCE_SECONDS
        }


class _MachineLostError(Exception): ...


class _Timeout(RendezvousTimeout):
    last_call = timedelta(seconds=LAST_CALL_SECONDS)


class ElasticRendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous of several machines, in a store on the host of `--rdzv`."""

    machines: Machines
    interface: str | None
    addresses: list[str]
    hosts_store: bool
    _timeout: _Timeout

    def __init__(self, node: Any, *rest: Any) -> None:
        """Called by torch's `from_backend`, which identifies machines by address and process id.
        Adds a random name, because two containers on one host may have the same address and the
        same process id."""
        super().__init__(replace(node, local_id=secrets.randbits(62)), *rest)
        refresh_rendezvous_state_after(self._state_holder, STATE_SECONDS)
        skip_rendezvous_records(self)
        judge_heartbeats_by(self._state_holder, Silence(self._this_node).lost)
        self.addresses = []
        self._met: Sequence[Any] = ()
        self._round = -1

    @classmethod
    def at(cls, machines: Machines) -> ElasticRendezvous:
        address = machines.resolve()
        own = address_on(machines.interface) if machines.interface is not None else ""
        own = own or address_towards(address, machines.port)
        timeout = _Timeout(join=timedelta(seconds=JOIN_SECONDS))
        try:
            hosted = host_store(machines, address)
            store = hosted or connect_store(machines, address, own)
            set_tcp_timeouts(address, machines.port)
            meeting: ElasticRendezvous = cls.from_backend(
                _RUN_ID,
                store,
                C10dRendezvousBackend(store, _RUN_ID),
                machines.least,
                machines.most,
                local_addr=own,
                timeout=timeout,
                keep_alive_interval=HEARTBEAT_SECONDS,  # type: ignore[arg-type]  # torch makes a timedelta of it
            )
        except (DistError, RendezvousError) as error:
            raise LaunchError(
                f"{machines.option} answers, but not as a rendezvous does ({error}); another"
                " program listens there; give another port"
            ) from error
        meeting.machines, meeting._timeout = machines, timeout
        meeting.hosts_store = hosted is not None
        meeting.interface = machines.interface or interface_of(own)
        return meeting

    def agree(self, name: str, value: str) -> str:
        """Return the `value` of the first machine that calls this method with `name`."""
        return bytes(self._store.compare_set(f"{_RUN_ID}.{name}", "", value)).decode()

    def next_rendezvous(self) -> RendezvousInfo:
        """Hold a rendezvous. The workers get a new store each time, because a lost machine would
        remain in the store of torch's rendezvous."""
        if self._timeout.last_call.total_seconds() == LAST_CALL_SECONDS:
            say(
                f"lockstep: waits at {self.machines.endpoint} for the machines of the run"
                f" ({self.machines.count})"
            )
        for _ in range(TRIES):
            if (info := self._meet()) is not None:
                self._timeout.last_call = timedelta(seconds=LAST_CALL_SECONDS)
                return info
        raise RendezvousTimeoutError

    def _meet(self) -> RendezvousInfo | None:
        self._bootstrap_store_info = self._shared_tcp_store_server = None
        with rendezvous_polls_every(RENDEZVOUS_POLL_SECONDS):
            try:
                info = super().next_rendezvous()
            except DistStoreError:
                return None
        state = self._state_holder.state
        self._met = sorted(state.participants, key=state.participants.__getitem__)
        self._round = state.round
        place = info.bootstrap_store_info
        assert place is not None
        own = self._this_node.addr
        number = info.rank if self.machines.node_rank is None else self.machines.node_rank
        store, rank, size = info.store, info.rank, info.world_size
        try:
            # keep the port open until all machines have tried to connect to it
            with socket.create_server((own, 0), family=family(own)) as listener:
                port = listener.getsockname()[1]
                store.set(f"{_RUN_ID}.listens-{rank}", json.dumps([own, port]))
                obstacle = self._obstacle(
                    place.master_addr, place.master_port, refusal_is_one=False
                )
                if obstacle is None:
                    following = self._text_from(store, f"listens-{(rank + 1) % size}")
                    obstacle = self._obstacle(*following, refusal_is_one=True)
                store.set(f"{_RUN_ID}.machine-{rank}", json.dumps([number, own, obstacle]))
                everyone = [self._text_from(store, f"machine-{each}") for each in range(size)]
        except _MachineLostError:
            return None
        try:
            check_machines(everyone)
        except LaunchError:
            self._wait_for_readers(store, rank, size)
            raise
        self.addresses = [address for _, address, _ in everyone]
        return RendezvousInfo(store, number, size, place)

    def _wait_for_readers(self, store: Store, rank: int, size: int) -> None:
        """Wait until all machines have read what all have written: a machine that ends takes with
        it the store that it hosts."""
        with suppress(DistError, RendezvousError, _MachineLostError):
            store.set(f"{_RUN_ID}.has-read-{rank}", "")
            while not store.check([f"{_RUN_ID}.has-read-{each}" for each in range(size)]):
                self._raise_if_lost()
                time.sleep(RENDEZVOUS_POLL_SECONDS / 5)

    def _text_from(self, store: Store, what: str) -> Any:
        while not store.check([f"{_RUN_ID}.{what}"]):
            self._raise_if_lost()
            time.sleep(RENDEZVOUS_POLL_SECONDS / 5)
        return json.loads(store.get(f"{_RUN_ID}.{what}"))

    def _raise_if_lost(self) -> None:
        if not set(self._met) <= self._participants().keys():
            raise _MachineLostError

    def _obstacle(self, address: str, port: int, *, refusal_is_one: bool) -> str | None:
        """Try to connect to a port of another machine. Returns the error as text. Detects addresses
        that are reachable only on their own host, as in containers."""
        began = time.monotonic()
        while True:
            try:
                socket.create_connection((address, port), timeout=REACH_SECONDS / 2).close()
                return None
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) and not refusal_is_one:
                    # the machine's host answers, so the network works; the machine itself is about
                    # to be lost
                    return None
                if time.monotonic() - began > REACH_SECONDS:
                    self._raise_if_lost()
                    return (
                        f"from {self._this_node.addr} on {self.interface} to {address} port {port}:"
                        f" {error}"
                    )
            time.sleep(0.5)

    def lost_machines(self) -> list[str]:
        here = Counter(node.addr for node in self._participants())
        return list((Counter(self.addresses) - here).elements())

    def machines_able(self, seconds: float) -> int:
        """Return the number of machines in the run that this machine wants to join. 0 if the
        workers of the run cannot continue in their processes."""
        until = time.monotonic() + seconds
        while True:
            count, state = len(self._participants()), self._state_holder.state
            if state.complete and self._are_able(state.round, range(count)):
                return count
            is_under_way = state.complete or state.round > 0
            if not is_under_way or state.closed or time.monotonic() > until:
                return 0
            time.sleep(RENDEZVOUS_POLL_SECONDS)

    def note_able(self) -> None:
        self._store.set(self._key(f"able-{self._met.index(self._this_node)}"), "")

    def all_are_able(self) -> bool:
        here = self._participants()
        left = [number for number, node in enumerate(self._met) if node in here]
        return self._are_able(self._round, left)

    def _are_able(self, meeting: int, machines: Sequence[int]) -> bool:
        return bool(self._store.check([f"{_RUN_ID}.able-{each}-{meeting}" for each in machines]))

    def announce(self, why: str) -> str:
        """Make the workers of all machines leave their collectives for a recovery in place. Returns
        the reason of the first machine that calls this method."""
        return bytes(self._store.compare_set(self._key("leaves"), "", why)).decode()

    def announced(self) -> str | None:
        key = self._key("leaves")
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def wait_for_all(self) -> None:
        """Wait for all machines of the latest rendezvous, except lost machines. All machines call
        this method, so that they join the next rendezvous at the same time."""
        if self._this_node in self._met:
            self._store.set(self._key(f"waits-{self._met.index(self._this_node)}"), "")
        while True:
            here = self._participants()
            if self.is_closed():  # a machine that may be lost has closed the rendezvous
                raise RendezvousClosedError
            missing = [number for number, node in enumerate(self._met) if node in here]
            if all(self._store.check([self._key(f"waits-{number}")]) for number in missing):
                break
            time.sleep(RENDEZVOUS_POLL_SECONDS / 2)
        self._timeout.last_call = timedelta(seconds=RECOVERY_CALL_SECONDS)

    def _key(self, what: str) -> str:
        return f"{_RUN_ID}.{what}-{self._round}"

    def _participants(self) -> Mapping[Any, int]:
        with self._heartbeat_lock:
            self._state_holder.sync()
            participants: Mapping[Any, int] = self._state_holder.state.participants
            return participants

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return store_on(
            socket.create_server((master_addr, master_port), family=family(master_addr))
        )


def check_machines(everyone: Sequence[tuple[int, str, str | None]]) -> None:
    """Raise an error unless the machines have different numbers and can connect to each other.
    `everyone` has the number, the address and the connection error of each machine."""
    by_number: dict[int, str] = {}
    for number, address, obstacle in everyone:
        if obstacle is not None:
            raise LaunchError(
                "a machine of the run reaches the rendezvous, but not another machine (tried"
                f" {obstacle}); the machines of a run must reach each other on all ports; open"
                " them, give --interface where there is another network, or start containers with"
                " --network=host"
            )
        if number in by_number:
            raise LaunchError(
                f"--node-rank {number} at {by_number[number]} and at {address}; each machine has"
                f" its own number, 0 to {len(everyone) - 1}; correct one of them"
            )
        by_number[number] = address


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


@contextmanager
def quiet_torch() -> Iterator[None]:
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    if "LOGLEVEL" not in os.environ:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
