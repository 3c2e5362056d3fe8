"""The functions that make the published tables, by what they are about."""
