"""Modules that compute from packed bytes. They replace the experts, linear layers and embeddings of transformers."""
