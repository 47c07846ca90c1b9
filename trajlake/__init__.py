"""The public face: what a user imports, and the `trajlake` command."""
