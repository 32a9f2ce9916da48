import subprocess
import sys

NO_MEMORY = """
import threading
from slipstream.runtime.lost_threads import exit_on_lost_thread

def no_memory(self):
    raise MemoryError

exit_on_lost_thread()
threading.Thread._bootstrap_inner = no_memory
threading.Thread(target=print).start()
"""


def test_a_thread_without_memory_to_begin_ends_the_process() -> None:
    """Otherwise `start` waits for it forever, in whichever thread called it."""
    ended = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "a thread could not begin" in ended.stderr
