"""Who owns what, which coordinates are sent, and how: layout, masks, exchange. Knows torch and a communication module."""
