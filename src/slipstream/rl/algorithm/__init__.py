"""The mathematics of an update: advantages, loss, importance corrections, optimizer, sharding.

Read `loss.py` first. No module here talks to an engine."""
