"""Reinforcement learning: tasks, rewards, algorithms and the training loop.

Read `trainer/run.py` first: `TrainingRun.take_step` shows a whole training step."""
