"""Services of a Python process: the event loop, TLS, garbage collection. They know nothing of models or fleets."""
