"""Recipes, benchmarks and checks of the quality of hf-linear-attn, each one command."""
