"""Faults on purpose: inject them into a training run (`injection.py`) and check what its processes promised (`checker.py`)."""
