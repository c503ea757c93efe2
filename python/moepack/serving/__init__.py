"""A model for many at a time: `engine` steps all sequences together, `server` is OpenAI's interface over HTTP to it."""
