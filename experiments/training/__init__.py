"""Training: optimiser, steps, device placement, checkpoints and the loop."""
