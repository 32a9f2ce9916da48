"""SLURM jobs: the batch script, and what each node runs. Start with `job.py`."""
