"""Why 16 bit fails here, and the smallest change that mends it: trace, ranges, audit, diff, tune."""
