import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading, time
from pathlib import Path
from slipstream.runtime.lost_threads import exit_on_lost_thread

exit_on_lost_thread()
threading.Thread(target=print).start()  # leaves its stack to the next thread, which then lacks only memory for Python
time.sleep(0.5)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
threading.Thread(target=print).start()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_thread_without_memory_to_begin_ends_the_process() -> None:
    """Otherwise `start` waits for it forever, in whichever thread called it."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (
        1,
        "slipstream: MemoryError: a thread could not begin, so this process ends\n",
    )


def test_other_exceptions_that_nobody_catches_are_printed() -> None:
    program = "\n".join(
        [*PROGRAM.splitlines()[:6], "class A:", "    __del__ = lambda self: 1 / 0", "A()", "time.sleep(0.5)"]
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "ZeroDivisionError" in ended.stderr
