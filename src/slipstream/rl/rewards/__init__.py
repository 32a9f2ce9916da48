"""Reward functions, in the trainer's process or in isolated worker processes.

Read `functions.py` for what a function gets and returns, and `rewarder.py` for how it is run."""
