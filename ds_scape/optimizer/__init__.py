"""SCAPE as an optimizer: the flow of a step, its state, the torch front and the seam to DeepSpeed's ZeRO."""
