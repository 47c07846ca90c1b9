"""The event log and what writes to it: backends, the recorder, importers."""
