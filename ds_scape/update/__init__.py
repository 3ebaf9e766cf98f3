"""The arithmetic of SCAPE: pure functions on tensors. No ranks, streams, settings or collectives in here."""
