"""Training checkpoints that another layout can resume."""
