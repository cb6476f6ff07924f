"""Tools of a training loop around a parallel model."""
