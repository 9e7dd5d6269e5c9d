"""What a bad step is made of: a captured micro-batch, its trace, and what mends it."""
