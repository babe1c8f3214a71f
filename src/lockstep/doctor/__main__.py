"""A rank of an examination: what `lockstep.doctor.examine` starts. SIGINT ends it without a traceback, also while torch is imported."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)

from lockstep.doctor.worker import run  # noqa: E402

run(sys.argv[1:])
