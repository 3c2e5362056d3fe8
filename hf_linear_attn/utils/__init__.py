"""Helpers without a subject of their own: files, JSON lines, environment, optional packages, number formatting, models,
time and memory.

Every other part of the package may import this one; it imports none of them.
"""
