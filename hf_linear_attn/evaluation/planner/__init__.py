"""Which layers of a model to convert under a budget: sensitivity, the curve, the choice and its verification."""
