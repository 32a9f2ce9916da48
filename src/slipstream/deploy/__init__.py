"""Run trainer, gateway and engines in one process, on one machine, or on many. Start with `fleet.py`."""
