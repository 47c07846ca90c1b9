"""Event types, table schemas, records and configuration; no I/O and no heavy library."""
