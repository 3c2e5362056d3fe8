"""Attention mechanisms: modules (q, k, v, mask, state) -> output. Importing this package registers them all."""

from . import kernelized, linformer, linformer_causal, softmax, window
from .base import LinearAttention

__all__ = ["LinearAttention", "kernelized", "linformer", "linformer_causal", "softmax", "window"]
