"""Running packed models: modules with packed weights, their stores and backends, loading, generating."""
