"""Inference engines: the embedded JAX engine, vLLM, and remote servers. `contract.py` says what all of them implement."""
