"""The forward pass in JAX, shared by trainer and embedded engine. Start with `decoder.py`."""
