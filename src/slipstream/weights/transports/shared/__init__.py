"""One copy of the weights in memory that trainer and engines share: on the host (`host_memory.py`) or on a GPU
(`cuda_memory.py`)."""
