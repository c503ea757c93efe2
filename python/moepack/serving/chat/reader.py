"""Splits an answer, as it is written, into reasoning, content and calls of functions.

Invariants: no text is lost. Text is passed on once no further text can change its kind. Text between the marks of a
call that is no call is content. White space next to marks is not part of what they separate.

Arguments in JSON are passed on as they are written: a call may take minutes. They are a call's from their first brace
on, even if the answer ends within them. Marks within their strings are text.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from moepack.serving.chat.calls import Call, ObjectReader, Syntax, Tools

__all__ = ["CallPart", "Delta", "Marks", "Reader", "new_id"]


@dataclass(frozen=True)
class CallPart:
    """A part of a call.

    Attributes:
        index: number of the call in the answer.
        arguments: further text of the arguments.
        name: name of the function, in the first part only.
        id: id of the call, in the first part only.
    """

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Delta:
    """A part of an answer. Exactly one of the fields is set."""

    content: str = ""
    reasoning: str = ""
    call: CallPart | None = None


@dataclass(frozen=True)
class Marks:
    """The marks of a family.

    Attributes:
        reasoning: the marks around reasoning; None if the model writes none.
        calls: how calls are written; None if they are not read.
    """

    reasoning: tuple[str, str] | None = None
    calls: Syntax | None = None


def new_id() -> str:
    """Return an id for a call. Mistral's templates require nine letters and digits."""
    return uuid.uuid4().hex[:9]


class Reader:
    """Reads one answer.

    Attributes:
        count: number of calls so far.

    Args:
        marks: the marks of the model's family.
        tools: the functions, whose types define how text arguments are read.
        reasons: whether the answer starts inside reasoning, because the prompt ends with its mark.
    """

    def __init__(self, marks: Marks, tools: Tools = (), reasons: bool = False) -> None:
        self._marks, self._tools = marks, tools
        self._kind = "reasoning" if reasons else "content"
        self._text = ""
        self._space = ""  # held back: dropped next to a mark
        self._is_new = True  # nothing but white space was written in the present part
        self._is_first = not reasons
        self._arguments: ObjectReader | None = None  # of a call that is being written
        self.count = 0

    def put(self, text: str) -> list[Delta]:
        """Add text; return what has become certain."""
        self._text += text
        return self._read(final=False)

    def end(self) -> list[Delta]:
        """Return the rest after the last text."""
        deltas = self._read(final=True)
        if self._kind == "call":
            deltas += self._closed(self._text, "")
            self._text = ""
        if self._space and not self.count and self._kind == "content":
            deltas.append(Delta(self._space))
        self._space = ""
        return deltas

    def _read(self, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            deltas += self._written_call()
            if self._arguments is not None and not self._arguments.has_ended:
                break
            marks = self._awaited()
            found = min(((place, mark) for mark in marks if (place := self._text.find(mark)) >= 0), default=None)
            if found is None:
                break
            place, mark = found
            before, self._text = self._text[:place], self._text[place + len(mark) :]
            deltas += self._cross(before, mark)
        if self._kind != "call":
            held = 0 if final else _uncertain(self._text, self._awaited())
            certain = len(self._text) - held
            deltas += self._written(self._text[:certain])
            self._text = self._text[certain:]
        return deltas

    def _awaited(self) -> list[str]:
        """Return the marks that can follow."""
        reasoning, calls = self._marks.reasoning, self._marks.calls
        if self._kind == "reasoning" and reasoning:
            return [reasoning[1]]
        if self._kind == "call" and calls:
            return [calls.closes] if calls.closes else []
        marks = [calls.opens] if calls else []
        return [*marks, reasoning[0]] if reasoning and self._is_first else marks

    def _cross(self, before: str, mark: str) -> list[Delta]:
        """Enter the next part at a mark."""
        reasoning, calls = self._marks.reasoning, self._marks.calls
        if self._kind == "call":
            deltas = self._closed(before, mark)
            self._kind = "content"
        elif reasoning and mark == reasoning[0] and self._kind == "content":
            if before.strip():  # not at the beginning of the answer: ordinary text
                self._is_first = False
                return self._written(before + mark)
            deltas, self._kind = [], "reasoning"
        else:
            deltas = self._written(before)
            self._kind = "call" if calls and mark == calls.opens else "content"
        self._is_first, self._is_new, self._space = False, True, ""
        return deltas

    def _written(self, text: str) -> list[Delta]:
        """Return text of the present kind. White space is held back until other text follows."""
        if self._marks == Marks():
            return [Delta(text)] if text else []
        text = self._space + text
        if self._is_new and (self._kind == "reasoning" or not self._is_first):
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return []
        self._is_new = self._is_first = False
        return [Delta(reasoning=shown) if self._kind == "reasoning" else Delta(shown)]

    def _written_call(self) -> list[Delta]:
        """Return what was written of a call whose arguments have begun."""
        deltas, calls = list[Delta](), self._marks.calls
        if self._kind == "call" and self._arguments is None and calls and calls.starts:
            found = calls.starts.match(self._text)
            if found is not None:
                deltas.append(Delta(call=CallPart(self.count, "", found[1], new_id())))
                self.count += 1
                self._arguments, self._text = ObjectReader(), self._text[found.end() :]
        if self._arguments is not None and not self._arguments.has_ended and self._text:
            size = self._arguments.take(self._text)
            deltas.append(Delta(call=CallPart(self.count - 1, self._text[:size])))
            self._text = self._text[size:]
        return deltas

    def _closed(self, text: str, closes: str) -> list[Delta]:
        """Return what follows of a call at its closing mark."""
        if self._arguments is None:
            return self._calls(text, closes)
        self._arguments = None
        rest = text.strip()
        # Further keys of the object are ignored, as if it were read as a whole.
        rest = "" if rest.startswith(",") else rest.removeprefix("}").strip()
        return [Delta(rest)] if rest else []

    def _calls(self, text: str, closes: str) -> list[Delta]:
        """Return the calls of a text, or the text as content."""
        syntax = self._marks.calls
        assert syntax is not None
        try:
            calls = syntax.parse(text, self._tools)
        except (ValueError, KeyError, TypeError, AttributeError):
            return [Delta(syntax.opens + text + closes)]
        return [delta for call in calls for delta in self._parts(call)]

    def _parts(self, call: Call) -> Sequence[Delta]:
        first = CallPart(self.count, "", call.name, new_id())
        self.count += 1
        return Delta(call=first), Delta(call=CallPart(first.index, call.arguments))


def _uncertain(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at the end that may start a mark."""
    longest = max(map(len, marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((size for size in lengths if any(mark.startswith(text[-size:]) for mark in marks)), 0)
