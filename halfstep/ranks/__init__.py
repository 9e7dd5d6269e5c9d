"""What the step needs of several ranks: a small interface, filled for one process, for replicas and for shards."""
