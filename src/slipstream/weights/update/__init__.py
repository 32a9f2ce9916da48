"""Weight updates: the trainer's half is `publisher.py`, the engine's half is `transfer.py`."""
