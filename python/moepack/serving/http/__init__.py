"""OpenAI's interface over HTTP."""
