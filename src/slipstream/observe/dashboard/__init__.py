"""The dashboard: reads records (`observe/recorder`) and serves them as pages and JSON. Read `api.py` first.

A run is opened anew for each request, so that it may be written, continued or deleted at any time."""
