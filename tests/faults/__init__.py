"""Faults done on purpose: broken files, full disks, killed processes.

`pytest -m fault` runs all of them, `python -m recipes.quality_assurance.marked_tests faults` also writes their table.
Those that need minutes are marked long.
"""
