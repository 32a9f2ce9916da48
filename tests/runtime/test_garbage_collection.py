"""Garbage collection in server processes."""

import subprocess
import sys

CHILD = """
import gc
import time
from slipstream.runtime import garbage_collection
garbage_collection.START_SECONDS = 0.1
garbage_collection.delay_collections()
assert not gc.isenabled()
time.sleep(0.5)
assert gc.isenabled(), "a process that is never frozen collects its garbage"
garbage_collection.START_SECONDS = 100.0
garbage_collection.delay_collections()
import jax  # has many objects
gc.collect()
before = len(gc.get_objects())
garbage_collection.freeze_loaded_objects()
assert gc.isenabled()
assert gc.get_freeze_count() > 0.9 * before > 10_000
assert len(gc.get_objects()) < 0.1 * before, "what a full collection looks at"
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() >= 1, "what comes later is collected as always"
"""


def test_what_is_loaded_is_not_looked_at_again():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
