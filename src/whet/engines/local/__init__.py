"""The in-process engine: continuous batching with a KV cache that reuses prefixes."""
