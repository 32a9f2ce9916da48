"""The training loop, its checkpoints, and recovery from lost processes.

Read `loop.py` for the loop, and `run.py` for a single step."""
