"""Memory and throughput of a training step before it runs, for a device that is not here."""
