"""Running packed models: packed modules, their stores and backends, loading and text generation."""
