"""``halfstep lint``: the mixed-precision mistakes that run without an error, found in source. No torch is needed."""
