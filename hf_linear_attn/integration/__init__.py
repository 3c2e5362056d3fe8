"""The only rooms that know Transformers' internals: attention interface, masks, caches, classes."""
