"""Reads answers in gpt-oss's format, harmony: messages with a channel, each a header and a body.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>

The channel `analysis` is reasoning and `final` is content. A message to a function is a call, whose body is its
arguments. Other messages are content.
"""

import re

from moepack.serving.chat.reader import CallPart, Delta, new_id

__all__ = ["HarmonyReader"]

HEADER_END = "<|message|>"
BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class HarmonyReader:
    """Reads one answer; the methods are those of `Reader`.

    Attributes:
        count: number of calls so far.

    Args:
        reads_calls: whether messages to functions are calls; otherwise they are content.
    """

    def __init__(self, reads_calls: bool) -> None:
        self._reads_calls = reads_calls
        self._text = ""
        self._kind: str | None = None  # of the present body; None inside a header
        self.count = 0

    def put(self, text: str) -> list[Delta]:
        """Add text; return what has become certain."""
        self._text += text
        return self._read(final=False)

    def end(self) -> list[Delta]:
        """Return the rest after the last text. A header without a body is content unless it has marks."""
        deltas = self._read(final=True)
        if self._kind is None and self._text.strip() and "<|" not in self._text and self._text != "assistant":
            deltas.append(Delta(self._text))
        return deltas

    def _read(self, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._text:
            if self._kind is None:
                header, mark, rest = self._text.partition(HEADER_END)
                if not mark:
                    break
                self._text = rest
                deltas += self._open(header)
                continue
            ends = [(place, end) for end in BODY_ENDS if (place := self._text.find(end)) >= 0]
            if ends:
                place, end = min(ends)
                deltas += self._body(self._text[:place])
                self._text, self._kind = self._text[place + len(end) :], None
                continue
            certain = len(self._text)
            if not final and (start := self._text.rfind("<", -len("<|return|>"))) >= 0:
                certain = start if any(end.startswith(self._text[start:]) for end in BODY_ENDS) else certain
            deltas += self._body(self._text[:certain])
            self._text = self._text[certain:]
            break
        return deltas

    def _open(self, header: str) -> list[Delta]:
        """Begin the body after a header."""
        to = TO.search(header)
        if to and self._reads_calls:
            self._kind = "call"
            self.count += 1
            return [Delta(call=CallPart(self.count - 1, "", to[1], new_id()))]
        self._kind = "reasoning" if "<|channel|>analysis" in header else "content"
        return []

    def _body(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._kind == "call":
            return [Delta(call=CallPart(self.count - 1, text))]
        return [Delta(reasoning=text) if self._kind == "reasoning" else Delta(text)]
