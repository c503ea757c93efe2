"""A chat with a model: the messages and the cached keys and values.

Invariant: messages are complete turns. An interrupted answer counts up to the point of interruption.
"""

import warnings
from collections.abc import Callable
from typing import Any

from moepack.errors import LoadError, MoepackWarning
from moepack.serving.text.generation import Memory, generate
from moepack.serving.text.prompts import has_template, positions, prompt_ids
from moepack.serving.text.sampling import Sampling

__all__ = ["Conversation", "conversation"]


def conversation(system: str | None, question: str) -> list[dict[str, str]]:
    """Return the messages of a chat that starts with a question."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": question}]


class Conversation:
    """A chat. Models without a chat template continue each text independently.

    Attributes:
        messages: all turns, without the system prompt.

    Args:
        model: a loaded model.
        tokenizer: its tokenizer.
        sampling: sampling settings for answers.
        system: the system prompt.

    Raises:
        LoadError: the model is an encoder-decoder.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling, system: str | None = None) -> None:
        if model.config.is_encoder_decoder:
            raise LoadError(
                "chat requires a decoder-only model, but this model is an encoder-decoder; use `moepack generate`"
            )
        self.model, self.tokenizer, self.sampling, self.system = model, tokenizer, sampling, system
        self.messages: list[dict[str, str]] = []
        self._memory = Memory()

    def answer(self, text: str, on_text: Callable[[str], None]) -> None:
        """Generate an answer and pass it to `on_text` in pieces.

        Raises:
            ValueError: the text has no tokens, or the chat template rejects it; the message is not added.
            KeyboardInterrupt: the user interrupted the answer.

        Warns:
            MoepackWarning: the oldest turns were dropped to stay within the model's context length.
        """
        pieces: list[str] = []

        def hand_out(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        said = self._fitting([*self.messages, {"role": "user", "content": text}])
        prompt = self._all(said) if has_template(self.tokenizer) else text
        try:
            generate(self.model, self.tokenizer, prompt, self.sampling, on_text=hand_out, memory=self._memory)
        finally:
            if pieces:
                self.messages = [*said, {"role": "assistant", "content": "".join(pieces)}]

    def _all(self, said: list[dict[str, str]]) -> list[dict[str, str]]:
        return said if self.system is None else [{"role": "system", "content": self.system}, *said]

    def _fitting(self, said: list[dict[str, str]]) -> list[dict[str, str]]:
        """The last turns that leave room for an answer."""
        limit, first = positions(self.model), 0
        if limit is None or not has_template(self.tokenizer):
            return said
        room = limit - self.sampling.max_new_tokens
        while first < len(said) - 1 and len(prompt_ids(self.tokenizer, self._all(said[first:]))) > room:
            first += 2
        if first:
            warnings.warn("the oldest messages were dropped to fit the context", MoepackWarning, stacklevel=3)
        return said[first:]
