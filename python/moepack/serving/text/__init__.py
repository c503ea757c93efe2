"""Text generation for one sequence: prompts, sampling, streamed text, chats."""
