"""The `kvsnap` command: each command parses, calls `kvsnap`, and prints."""
