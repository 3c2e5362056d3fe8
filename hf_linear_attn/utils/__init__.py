"""Helpers without a subject of their own: files, JSON lines, environment, optional packages, number formatting, models.

Every other part of the package may import this one; it imports none of them.
"""
