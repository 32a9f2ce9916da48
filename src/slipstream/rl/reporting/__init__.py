"""Records of a run, and where they are shown: log files, TensorBoard, W&B, terminal, plot. Read `records.py` first."""
