"""What a process does before native code ends it."""

from __future__ import annotations

import signal
import sys

import pytest
from processes import ran

SCRIPT = """
import ctypes, sys, threading
from lockstep.comm.native_end import NativeEnd
end = NativeEnd(lambda: print("told by", threading.current_thread().name[:5], flush=True))
if sys.argv[1] == "closed":
    end.close()
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
threading.Thread(target=terminate, name="native").start()
threading.Event().wait(20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize(("state", "said"), [("open", "told by nativ\n"), ("closed", "")])
@pytest.mark.command
def test_the_function_is_called_before_the_process_aborts(state: str, said: str) -> None:
    done = ran([sys.executable, "-c", SCRIPT, state])
    assert done.returncode == -signal.SIGABRT
    assert done.stdout == said
