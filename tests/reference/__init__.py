"""The definitions of every operation in float64, once: explicit weights or one token at a time, without blocks."""
