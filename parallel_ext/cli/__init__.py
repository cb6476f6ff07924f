"""The command ``parallel-ext``: what saved models and checkpoints hold, from the shell."""
