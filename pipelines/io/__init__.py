"""Delta source and sink for Beam."""
