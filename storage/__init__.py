"""Files and blobs by URL."""
