"""Entry point of the process of one rank of `lockstep doctor`. It starts with SIGINT blocked, so
that SIGINT prints no traceback, even during the imports."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

from lockstep.doctor.worker import run  # noqa: E402

run(sys.argv[1:])
