"""Gateway and engines as processes of a machine, their run directory and certificates. Start with `process_group.py`."""
