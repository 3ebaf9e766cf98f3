"""SCAPE: an optimizer that sends a small part of the gradient per step. Not built yet."""
