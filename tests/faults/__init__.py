"""Faults done on purpose: broken files, full disks, killed processes. `recipes.quality_assurance.faults` keeps them.

One file for each kind; a fault is a function that does it, checks what must hold, and returns what was seen. The quick
ones are tests; the others need minutes, and are run by the recipe alone.
"""
