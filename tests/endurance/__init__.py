"""Drift, memory, reproducibility and threads: small sizes as tests, the long ones by `recipes/endurance.py`."""
