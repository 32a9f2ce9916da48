"""Token sampling on the device, bitwise independent of the rest of the batch. Start with `sampler.py`."""
