"""Moving weights from trainer to engines: sources, the plan (`plan.py`, read it first), transports and the update itself."""
