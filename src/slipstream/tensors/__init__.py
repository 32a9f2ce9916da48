"""Tensor geometry and storage, without transports. Start with `boxes.py`."""
