"""The front half shared by all engines: request parsing, samples, result delivery. Start with `frontend.py`."""
