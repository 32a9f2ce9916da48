import subprocess
import sys

import pytest

BEGIN = """
import resource, threading, time
from pathlib import Path
from slipstream.runtime.out_of_memory import exit_when_out_of_memory

exit_when_out_of_memory()
"""
THREAD = """
threading.Thread(target=print).start()  # leaves its stack to the next thread, which then lacks only memory for Python
time.sleep(0.5)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
threading.Thread(target=print).start()
"""
OTHER = """
class Other:
    def __del__(self):
        1 / 0

Other()
time.sleep(0.5)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_thread_without_memory_to_begin_ends_the_process() -> None:
    """Otherwise `start` waits for it forever, in whichever thread called it."""
    ended = run(THREAD)
    assert ended.returncode == 1 and "MemoryError: a thread or a callback could not run" in ended.stderr


def test_other_exceptions_are_printed() -> None:
    ended = run(OTHER)
    assert ended.returncode == 0 and "ZeroDivisionError" in ended.stderr
