"""Running packed models: expert modules that compute from mapped bytes, loading, generating."""
