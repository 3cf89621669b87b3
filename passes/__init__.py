"""The rewrite, one pass a file."""
