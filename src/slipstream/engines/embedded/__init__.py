"""The embedded JAX engine. Start with `engine.py`, then `compute_thread.py`."""
