"""Measuring: functions from a loaded model to its quality, recall, fidelity, speed and memory. Nothing is written."""
