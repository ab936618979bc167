"""Where chunks are kept: host memory that outlives the engine, and shards on disk."""
