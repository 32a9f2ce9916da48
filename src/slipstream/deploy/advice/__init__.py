"""`slipstream plan`: predict the cost of a sync, and recommend a topology. Start with `topology.py`."""
