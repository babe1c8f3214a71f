"""The process behind a training process that hashes, writes and commits what it saves: `python -m lockstep.checkpoint.writer MEMORY`.

It imports no torch. MEMORY is a descriptor of memory that it shares with the training process, in which a file lies as it is to be. The
first line on its standard input, JSON, says what lies where in it; every other is a job; a line on its standard output is what came of it.
It ends when its input does.

Every rank writes its own file, and beside it a note of its blocks. Rank 0 waits for the notes of all, makes the manifest of them, and
commits.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
import time
from typing import Any

from lockstep.checkpoint.block_hashes import Seal, cut, digest
from lockstep.checkpoint.folder import Name, Storage
from lockstep.checkpoint.manifest import File, Manifest, Place, merged
from lockstep.checkpoint.retain import retired
from lockstep.checkpoint.store import folder_at

NICE = 10
"""How much this process stands back where training wants the processors."""


def save(job: dict[str, Any], places: tuple[Place, ...], image: memoryview) -> None:
    """Write this rank's file, and on rank 0 make a checkpoint of all. Raises `OSError`."""
    folder, name = folder_at(job["folder"]), Name(job["step"], job["attempt"])
    folder.begin(name)
    blocks: list[str] = []

    def hashed(block: memoryview) -> memoryview:
        blocks.append(digest([block]))
        return block

    folder.write(name, job["file"], map(hashed, cut(image)))
    mine = File(Seal(len(image), tuple(blocks)), places)
    if "files" not in job:
        folder.write(name, note(job["file"]), [json.dumps([job["save"], mine.say(), job["values"]]).encode()])
        return
    others = [file for file in job["files"] if file != job["file"]]
    notes = {file: _awaited(folder, name, file, job["save"]) for file in others}
    files = {job["file"]: mine} | {file: File.read(said) for file, (said, _) in notes.items()}
    values = merged([job["values"], *(theirs for _, theirs in notes.values())])
    for file in others:
        folder.drop(name, note(file))
    folder.commit(name, Manifest(step=name.step, files=files, values=values, facts=job["facts"]).encode())


def _awaited(folder: Storage, name: Name, file: str, save: str) -> tuple[Any, Any]:
    """From another rank's note of this save, its file and values. Until it is there; where it never is, the training process ends this."""
    while True:
        if (said := folder.written(name, note(file))) is not None:
            try:
                of, mine, values = json.loads(said)
            except ValueError:
                of = None  # still being written
            if of == save:
                return mine, values
        time.sleep(folder.wait_seconds)


def _retire(job: dict[str, Any]) -> str | None:
    """After a commit, delete what is not to be kept. Returns why it could not."""
    if "keep" not in job:
        return None
    folder, keep = folder_at(job["folder"]), job["keep"]
    names = {str(name): name for name in folder.names()}
    scores = {names[text]: score for text, score in keep["scores"].items() if text in names}
    try:
        for name in retired(
            names.values(),
            newest=Name(job["step"], job["attempt"]),
            last=keep["last"],
            every=keep["every"],
            scores=scores,
            mode=keep["mode"],
        ):
            folder.delete(name)
    except OSError as error:
        return _words(error)
    return None


def _words(error: OSError) -> str:
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def note(file: str) -> str:
    """What a rank leaves for rank 0 beside its file: its blocks and places, and its part of the values."""
    return f"{file}.json"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # those who ask the training process to end ask all
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    memory = int(sys.argv[1])
    lines = _Lines()
    layout = lines.next()
    places = tuple(Place(tuple(piece), start) for *piece, start in layout["pieces"])
    image = memoryview(mmap.mmap(memory, layout["bytes"], prot=mmap.PROT_READ))
    while True:
        job = lines.next()
        try:
            save(job, places, image)
            said = {"step": job["step"], "error": None, "left": _retire(job)}
        except OSError as error:
            said = {"step": job["step"], "error": _words(error)}
        try:
            print(json.dumps(said), flush=True)
        except BrokenPipeError:  # the training process has ended
            os._exit(0)


class _Lines:
    """Lines of the standard input. Where it ends, so does this process, whatever it is doing."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._lines: list[str] = []
        threading.Thread(target=self._read, name="lockstep-checkpoint-writer", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.append(line)
            self._arrived.release()
        os._exit(0)

    def next(self) -> dict[str, Any]:
        self._arrived.acquire()
        found: dict[str, Any] = json.loads(self._lines.pop(0))
        return found


if __name__ == "__main__":
    main()
