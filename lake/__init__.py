"""Delta tables: open, commit, read, tail, SQL."""
