"""Shard a HuggingFace model over ranks, and give it the methods of the full model."""
