"""What runs on the device: weights and KV cache, attention, compiled programs. Start with `executor.py`."""
