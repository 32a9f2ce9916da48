"""The trainer's API: `Bridge` and what it returns. Start with `bridge.py`; `engine.py` is the embedded engine as a library."""
