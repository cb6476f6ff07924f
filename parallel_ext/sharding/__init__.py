"""Say which rank holds which part of a tensor, and move parts between layouts."""
