"""SCAPE's arithmetic over whole buffers: one table of operations (ops.py), implementations by name that agree on every bit."""
