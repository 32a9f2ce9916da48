"""One copy of the weights for trainer and engines: on the host (`host_memory.py`) or on a GPU (`cuda_memory.py`)."""
