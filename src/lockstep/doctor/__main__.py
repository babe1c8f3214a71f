"""The entry point of each rank of `lockstep doctor`. The process starts with SIGINT blocked, so
that Ctrl-C prints no traceback during the imports."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

from lockstep.doctor.worker import run  # noqa: E402

run(sys.argv[1:])
