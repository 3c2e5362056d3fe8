"""Evaluation: quality, speed and memory of a model with linear attention, beside its exact attention."""
