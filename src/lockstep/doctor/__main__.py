"""Entry point of one rank, which `lockstep.doctor.diagnose` starts with SIGINT blocked. SIGINT then
ends the rank without a traceback, also while Python starts and torch is imported."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

from lockstep.doctor.worker import run  # noqa: E402

run(sys.argv[1:])
