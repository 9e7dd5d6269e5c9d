"""halfstep in the frameworks that own the loop: Lightning, Accelerate, Transformers and TRL."""
