"""The launcher keeps the images of a start until those of the next one are kept on all machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from lockstep.launch.recovery.channel import Channel
from lockstep.launch.recovery.connections import Connections


class Workers:
    """Two workers' ends of their connections to a launcher."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.ends: list[Channel] = []
        for rank in range(2):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections.use(rank, Channel(ours))
            self.ends.append(Channel(theirs))

    def offer(self, rank: int, names: list[str]) -> None:
        descriptors = [os.memfd_create(name) for name in names]
        self.ends[rank].send("images", descriptors)
        for each in descriptors:
            os.close(each)

    def rejoin(self) -> list[list[str]]:
        """Names of the memory that each worker gets."""
        self.connections.rejoin({0: {}, 1: {}}, lost_at=0.0)
        found = []
        for end in self.ends:
            message = end.receive(1.0)
            assert message is not None
            found.append([_name(each) for each in message["descriptors"]])
            for each in message["descriptors"]:
                os.close(each)
        return found

    def held(self) -> list[str]:
        self.connections.look()
        return [
            _name(each)
            for images in self.connections.images
            for several in images.values()
            for each in several
        ]


def _name(descriptor: int) -> str:
    return (
        os.readlink(f"/proc/self/fd/{descriptor}")
        .removeprefix("/memfd:")
        .removesuffix(" (deleted)")
    )


@contextmanager
def workers() -> Iterator[Workers]:
    connections = Connections(None)
    found = Workers(connections)
    try:
        yield found
    finally:
        connections.close()
        for end in found.ends:
            end.close()


def offered(found: Workers, start: str) -> None:
    for rank in range(2):
        found.offer(rank, [f"{start} of {rank}", f"{start} kept by {rank}"])


def test_older_images_are_kept_until_a_worker_says_that_all_ranks_have_offered_theirs() -> None:
    with workers() as found:
        offered(found, "first")
        found.ends[1].send("all-offered")
        first = ["first of 0", "first kept by 0", "first of 1", "first kept by 1"]
        assert found.held() == first
        assert found.rejoin() == [first] * 2
        offered(found, "second")
        second = [name.replace("first", "second") for name in first]
        assert found.held() == [*first, *second], "other machines may not have theirs"
        found.ends[0].send("all-offered")
        assert found.held() == second
        assert found.rejoin() == [second] * 2


@pytest.mark.parametrize("ends_first", [False, True])
def test_images_that_a_worker_gave_last_are_kept(ends_first: bool) -> None:
    with workers() as found:
        offered(found, "first")
        if ends_first:
            found.ends[1].close()
        found.connections.drop([1])
        assert found.held() == ["first of 1", "first kept by 1", "first of 0", "first kept by 0"]


def test_workers_that_refuse_to_go_on_are_not_replaced_even_if_all_have_ended() -> None:
    with workers() as found:
        for end in found.ends:
            end.send("able", why_not=None, sizes=[2], script_seconds=0.0)
        assert found.connections.why_not([], lost=[0, 1]) is None
        found.ends[1].send("able", why_not="its training has failed", sizes=[2], script_seconds=0.0)
        assert found.connections.why_not([], lost=[0, 1]) is None
        found.ends[1].send("refuses", why_not="the script is another")
        assert found.connections.why_not([], lost=[0, 1]) == "rank 1: the script is another"


def test_a_message_may_be_longer_than_the_system_sends_at_once() -> None:
    ours, theirs = (
        Channel(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    sent = [{"text": letter * size} for letter, size in (("a", 1), ("b", 2**21), ("c", 2**15))]
    assert theirs.receive(0.0) is None
    # each send waits for the receiver to make room; two do not mix
    with ThreadPoolExecutor() as threads:
        done = [threads.submit(ours.send, "told", [], **each) for each in sent]
        found = [theirs.receive() for _ in sent]
        assert [each.result() for each in done] == [None] * 3
    assert sorted([str(each and each["text"]) for each in found]) == [each["text"] for each in sent]
    assert not theirs.has_ended
    ours.close()
    assert (theirs.receive(), theirs.has_ended) == (None, True)
    theirs.send("nothing")  # to nobody
    theirs.close()


def test_a_message_whose_sender_was_killed_is_dropped_and_one_that_comes_in_parts_is_waited_for() -> (
    None
):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = Channel(theirs)
    given = os.memfd_create("given")
    socket.send_fds(ours, [b"\x01" + b'{"kind": "cut'], [given])
    assert (receiver.receive(0.0), receiver.has_ended) == (None, False)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ours, [b"\x01" + b'{"kind": '], [])
    assert receiver.receive(0.0) is None
    assert len(os.listdir("/proc/self/fd")) == before - 1
    socket.send_fds(ours, [b"\x02" + b'"whole"}'], [])
    assert receiver.receive(0.0) == {"kind": "whole", "descriptors": []}
    for each in (ours, receiver):
        each.close()
    os.close(given)


def test_a_message_carries_more_descriptors_than_the_system_sends_at_once() -> None:
    ours, theirs = (
        Channel(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    names = [f"image {number}" for number in range(600)]
    opened = [os.memfd_create(name) for name in names]
    ours.send("able", why_not="it")
    ours.send("images", opened)
    ours.send("ready", step=7)
    try:
        first, second, third = (theirs.receive(1.0) for _ in range(3))
        assert first == {"kind": "able", "why_not": "it", "descriptors": []}
        assert third == {"kind": "ready", "step": 7, "descriptors": []}
        assert second is not None
        assert [_name(each) for each in second["descriptors"]] == names
        opened += second["descriptors"]
    finally:
        for each in opened:
            os.close(each)
        ours.close()
        theirs.close()
