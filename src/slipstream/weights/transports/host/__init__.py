"""Transports through host memory: `memory`, `shm`, `tcp` and `disk`. All implement `transports/contract.py`."""
