import signal
import subprocess
import sys

import pytest

BEGIN = """
import gc, os, resource, signal, threading, time
from pathlib import Path
from slipstream.runtime.unraisable import watch_unraisable

watch_unraisable()
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

INTERRUPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGINT) if not gc.callbacks.clear() else None)
gc.collect()
time.sleep(600)
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


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    ended = run(INTERRUPT)
    assert ended.returncode == -signal.SIGINT and ended.stderr.rstrip().endswith("KeyboardInterrupt")
