"""Training over several ranks: start them, wrap a model for them, save and resume, and DeepSpeed's own engine."""
