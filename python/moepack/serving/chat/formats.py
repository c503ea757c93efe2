"""The format that a model writes answers in, found from its chat template."""

from dataclasses import dataclass

from moepack.serving.chat.calls import Syntax, Tools, syntax_of
from moepack.serving.chat.harmony import HarmonyReader
from moepack.serving.chat.reader import Marks, Reader

__all__ = ["Format", "format_of"]

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The marks around reasoning: of most families, and of Mistral."""


@dataclass(frozen=True)
class Format:
    """How a model writes reasoning and calls.

    Attributes:
        thoughts: the marks around reasoning; None if it writes none, or in harmony.
        calls: how calls are written; None if unknown, or in harmony.
        is_harmony: the format is gpt-oss's.
    """

    thoughts: tuple[str, str] | None = None
    calls: Syntax | None = None
    is_harmony: bool = False

    @property
    def has_calls(self) -> bool:
        """Whether calls of functions can be read."""
        return self.calls is not None or self.is_harmony

    def is_reasoning(self, prompt: str) -> bool:
        """Return whether an answer to a rendered prompt starts inside reasoning."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts[0])

    def reader(self, prompt: str, tools: Tools = (), splits_reasoning: bool = True) -> Reader | HarmonyReader:
        """Return a reader for an answer to a rendered prompt. Without tools, calls are content."""
        if self.is_harmony:
            return HarmonyReader(bool(tools))
        thoughts = self.thoughts if splits_reasoning else None
        marks = Marks(thoughts, self.calls if tools else None)
        return Reader(marks, tools, thoughts is not None and self.is_reasoning(prompt))


def format_of(template: str) -> Format:
    """Return the format of a chat template."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Format(is_harmony=True)
    thoughts = next((marks for marks in THOUGHTS if marks[1] in template), None)
    return Format(thoughts, syntax_of(template))
