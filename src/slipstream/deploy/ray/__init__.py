"""Gateway and engines as actors of a Ray cluster. Start with `cluster.py`."""
