"""Serves a model to many clients: `engine` steps all sequences together, `server` offers OpenAI's HTTP API."""
