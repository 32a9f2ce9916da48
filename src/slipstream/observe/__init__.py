"""Diagnosis: `doctor.py` checks a machine and a fleet, `mismatch.py` the logprobs of trainer and engines.
`recorder/` writes what a run does, and `dashboard/` shows it."""
