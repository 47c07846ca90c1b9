"""From the lake to a better policy."""
