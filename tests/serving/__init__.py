"""Many requests to one model."""
