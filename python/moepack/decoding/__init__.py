"""Decoding steps of whole models: by the core, by CUDA graphs, or by transformers; checks of tokens and logits."""
