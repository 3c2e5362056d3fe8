"""Winning quality back after a conversion."""
