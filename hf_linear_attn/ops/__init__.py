"""Pure functions on tensors. Needs torch only; `naive` holds the definitions that the fast forms are tested against."""
