"""Decoder models: families, forward pass, checkpoints. Start with `config.py`, then `transformer/decoder.py`."""
