"""The native CPU backend: fused kernels in C++, compiled for this machine on first use. See `build` and `backend`."""
