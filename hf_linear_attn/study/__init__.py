"""Studies: evaluations and plans, whose measurements and learned parameters are stored and not made twice."""
