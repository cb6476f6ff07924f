"""Modules whose parameters are sharded, and the sums of their gradients; torch alone."""
