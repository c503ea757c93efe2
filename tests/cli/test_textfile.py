"""Users' text files: encodings, byte order marks, error positions, and every entry point that reads such a file."""

import codecs
import io
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moepack import textfile
from moepack.calibration import read_texts
from moepack.cli import app
from moepack.errors import CalibrationError, TextError
from moepack.evaluation.windows import read_windows
from moepack.report.quality import prompts_of
from moepack.textfile import TextReader, read_text

ENCODINGS = {
    "utf-8": b"",
    "utf-8 with a mark": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
TEXT = "Café — 你好 🙂\nשלום\n"
encodings = pytest.mark.parametrize("encoding", ENCODINGS)


def encoded(text, encoding):
    return ENCODINGS[encoding] + text.encode(encoding.partition(" ")[0])


class Trickle(io.BytesIO):
    """A pipe that delivers one byte at a time."""

    def read1(self, size=-1):
        return self.read(1)


@encodings
@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])), chars=st.integers(0, 40))
def test_every_encoding_with_a_mark_gives_the_same_text(encoding, text, chars):
    text = text.removeprefix("\ufeff")
    for stream in (io.BytesIO(encoded(text, encoding)), Trickle(encoded(text, encoding))):
        reader = TextReader(stream, "text")
        assert reader.read(chars) == text[:chars]
        assert reader.read() == text[chars:]
    reader = TextReader(Trickle(encoded(text, encoding)), "text")
    assert list(iter(reader.readline, "")) == io.StringIO(text, newline="\n").readlines()


@encodings
def test_line_ends_become_one_character(encoding, tmp_path):
    (tmp_path / "text").write_bytes(encoded("a\r\nb\rc\n", encoding))
    assert read_text(tmp_path / "text") == "a\nb\nc\n"
    assert TextReader(Trickle(encoded("a\r\nb", encoding)), "text").readline() == "a\n"


WRONG = {
    "Latin-1": (b"caf\xe9 au lait", r"is not UTF-8 text \(invalid continuation byte at byte 3\); save it as UTF-8"),
    "a character cut off": ("café".encode()[:-1], r"not UTF-8 text \(unexpected end of data at byte 3\)"),
    "a surrogate": (b"ab\xed\xa0\x80", r"not UTF-8 text \(invalid continuation byte at byte 2\)"),
    "Windows-1252 behind a mark": (codecs.BOM_UTF8 + b"\x93a\x94", r"not UTF-8 text \(invalid start byte at byte 3\)"),
    "half a character of UTF-16": (codecs.BOM_UTF16_LE + b"a\0b", r"not UTF-16 text \(truncated data at byte 4\)"),
    "half a pair of UTF-16": (codecs.BOM_UTF16_BE + b"\0a\xd8\x3d\0b", r"not UTF-16 text \(.* at byte 4\)"),
    "too large for UTF-32": (codecs.BOM_UTF32_LE + b"a\0\0\0\0\0\x11\0", r"not UTF-32 text \(.* at byte 8\)"),
    "UTF-16 without a mark": ("ab".encode("utf-16-le"), r"binary, or UTF-16 without a byte order mark .* at byte 1\)"),
    "binary": (b"\x7fELF\2\1\1\0\0", "is binary"),
}
wrong = pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)


@wrong
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_invalid_text_is_rejected_with_its_position(tmp_path, monkeypatch, data, message, chunk):
    monkeypatch.setattr(textfile, "CHUNK", chunk)
    (tmp_path / "notes.txt").write_bytes(data)
    with pytest.raises(TextError, match=message) as caught:
        read_text(tmp_path / "notes.txt")
    assert caught.value.file == str(tmp_path / "notes.txt")
    assert str(caught.value).startswith(f"{tmp_path / 'notes.txt'}: ")


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 20])
def test_the_place_is_that_in_the_file_however_long(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(textfile, "CHUNK", chunk)
    data = codecs.BOM_UTF8 + "é".encode() * 5000 + b"\xe9"
    (tmp_path / "long").write_bytes(data)
    with pytest.raises(TextError, match=rf"at byte {len(data) - 1}\)"):
        read_text(tmp_path / "long")


def test_a_file_that_cannot_be_read_is_a_text_error(tmp_path):
    with pytest.raises(TextError, match="cannot be read: No such file") as caught:
        read_text(tmp_path / "missing")
    assert caught.value.file == str(tmp_path / "missing")


def letters(text, **options):
    """A tokenizer with a token for each character."""
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@encodings
def test_texts_to_measure_and_to_calibrate_with_take_every_encoding(tmp_path, encoding):
    text = TEXT * 60
    (tmp_path / "text.txt").write_bytes(encoded(text, encoding))
    assert read_windows(tmp_path / "text.txt", 600, letters).ids[0].tolist() == [ord(letter) for letter in text[:512]]
    assert list(read_texts(tmp_path / "text.txt")) == [text]
    assert prompts_of(tmp_path / "text.txt", 600)[0].split()[0] in text
    rows = [{"text": "one\u2028two"}, {"text": "three\x85"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "text.jsonl").write_bytes(encoded(lines, encoding))
    assert list(read_texts(tmp_path / "text.jsonl")) == ["one\u2028two", "three\x85"]


@wrong
def test_texts_to_measure_and_to_calibrate_with_are_refused_by_name(tmp_path, data, message):
    file = tmp_path / "notes.txt"
    file.write_bytes(data)
    for read in (lambda: read_windows(file, 600, letters), lambda: prompts_of(file, 600)):
        with pytest.raises(TextError, match=message) as caught:
            read()
        assert caught.value.file == str(file)
    with pytest.raises(CalibrationError, match=message) as caught:
        list(read_texts(file))
    assert caught.value.file == str(file)


@encodings
def test_prompts_and_chats_take_every_encoding(mixtral, tmp_path, encoding):
    (tmp_path / "prompt").write_bytes(encoded("The sea é", encoding))
    options = ["generate", str(mixtral), "--max-new-tokens", "2"]
    given = CliRunner().invoke(app, [*options, "--prompt", "The sea é"])
    assert given.exit_code == 0 and given.stdout.startswith("The sea é")
    file = CliRunner().invoke(app, [*options, "--prompt-file", str(tmp_path / "prompt")])
    stdin = CliRunner().invoke(app, [*options, "--prompt", "-"], input=encoded("The sea é", encoding))
    assert file.stdout == stdin.stdout == given.stdout
    talk = ["chat", str(mixtral), "--max-new-tokens", "2", "--temperature", "0"]
    said = [CliRunner().invoke(app, talk, input=encoded("The sea é\n/bye\n", each)) for each in ("utf-8", encoding)]
    assert said[0].exit_code == said[1].exit_code == 0
    assert said[0].stdout == said[1].stdout != ""


def test_prompts_and_chats_that_are_not_text_are_refused_by_name(mixtral, tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    for door in (["generate", "--prompt-file"], ["eval", "--text"]):
        result = CliRunner().invoke(app, [door[0], str(mixtral), door[1], str(tmp_path / "latin.txt")])
        assert result.exit_code == 2
        assert f"error: {tmp_path / 'latin.txt'}: is not UTF-8 text (unexpected end of data at byte 3)" in result.stderr
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    result = CliRunner().invoke(app, ["generate", str(mixtral), "--prompt-file", str(tmp_path / "empty.txt")])
    assert result.exit_code == 2 and f"error: {tmp_path / 'empty.txt'}: is empty" in result.stderr
    result = CliRunner().invoke(app, ["generate", str(mixtral), "--prompt", "-"], input=b"caf\xe9 ")
    assert result.exit_code == 2 and "error: standard input: is not UTF-8 text" in result.stderr
    result = CliRunner().invoke(app, ["chat", str(mixtral)], input=b"caf\xe9 \n")
    assert isinstance(result.exception, TextError) and "standard input: is not UTF-8 text" in str(result.exception)
