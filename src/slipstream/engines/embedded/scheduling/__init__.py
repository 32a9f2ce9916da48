"""Continuous batching: which samples run in the next tick, and on which pages. No JAX. Start with `scheduler.py`."""
