"""The data plane: how weights reach engines. `contract.py` defines transports through host memory, `device.py` those
between accelerators; each folder implements one kind."""
