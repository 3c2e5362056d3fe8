"""Pure functions on tensors, which need torch only. Their definitions in float64 are in `tests/reference`."""
