"""Persistent KV cache snapshots and warm starts for vLLM.

The core: keys, identity, layout, the two tiers and snapshot repositories. It
imports neither vLLM nor, at import time, torch, boto3 or pyarrow.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
