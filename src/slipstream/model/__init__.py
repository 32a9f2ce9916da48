"""Decoder models: config, families, forward pass, checkpoints. Start with `config.py`, then `families/` and
`transformer/decoder.py`."""
