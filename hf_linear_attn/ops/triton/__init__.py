"""Fused GPU kernels for kernelized attention, in Triton: imported when first used, on a machine that has Triton."""
