import json
import re
import zlib
from collections import Counter
from functools import cache
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from moepack.calibration import built_in, token_windows
from moepack.calibration.built_in import FOLDER, WEIGHTS, built_in_windows, pieces, turns
from moepack.calibration.load import load_samples
from moepack.calibration.text import check_source, read_texts
from moepack.checkpoint import Checkpoint
from moepack.errors import CalibrationError
from moepack.methods import METHODS, create
from moepack.methods.settings import settings_of
from moepack.textfile import BUILT_IN, OWN_SAMPLES
from places import ROOT, TINY_MOE

SAMPLES = "b08a8c98ae9c50bf9d52b83dfa845b7bbebee447b842c297252418cedba88c4d"
"""Fingerprint of the default windows, with the example model's tokenizer."""

LARGEST = 600_000
"""Bytes that the text may take in a wheel, which is compressed by deflate."""


TOKEN = re.compile(r" ?[A-Za-z\u00c0-\u024f]{1,6}| ?\d{1,3}| ?[\u0250-\u0fff]{1,4}|\s+| ?[^\w\s]{1,2}|.")
"""Roughly the tokens of a vocabulary of 200,000, which has long tokens: the fewest that the text may give."""


class Tokenizer:
    """A tokenizer with a large vocabulary and without a chat template."""

    chat_template = None

    def __call__(self, text, *, add_special_tokens, verbose):
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[zlib.crc32(token.encode()) % 50_000 for token in TOKEN.findall(text)])


class Marking(Tokenizer):
    """One token for all text of a stream: its index."""

    def __init__(self):
        self.texts = list(built_in._streams(None).values())

    def __call__(self, text, *, add_special_tokens, verbose):
        return SimpleNamespace(input_ids=[self.texts.index(text)] * tokens_of(text))


@cache
def tokens_of(text):
    """Return the number of tokens of a text with a large vocabulary."""
    return len(Tokenizer()(text, add_special_tokens=False, verbose=False).input_ids)


def kinds_of(windows):
    """Return the kind of each window's first token."""
    kinds = [kind for kind, _ in built_in._streams(None)]
    return [kinds[window[0]] for window in windows.tolist()]


def test_every_piece_has_a_source_and_a_licence_that_allow_its_distribution():
    for piece in pieces():
        assert piece.licence in ("public domain", "Apache-2.0"), piece
        assert piece.title and piece.source and piece.kind in WEIGHTS and piece.stream, piece
        assert len(piece.text()) > 500, piece
    files = {file.name for file in FOLDER.iterdir()}
    assert files == {"index.json", *(piece.file for piece in pieces())}


def test_the_text_covers_what_it_promises_within_its_size():
    streams = {kind: {piece.stream for piece in pieces() if piece.kind == kind} for kind in WEIGHTS}
    assert all(streams.values())
    assert len(streams["languages"]) >= 8 and len(streams["code"]) >= 6
    assert sum(len(zlib.compress(file.read_bytes(), 6)) for file in FOLDER.iterdir()) < LARGEST


def test_the_documentation_lists_every_piece():
    page = (ROOT / "docs" / "calibration-text.md").read_text(encoding="utf-8")
    for piece in pieces():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{piece.file}` "))
        for text in (piece.stream, piece.title, piece.source, piece.licence):
            assert text in row, (piece.file, text)


def test_any_number_of_windows_covers_all_kinds_in_proportion():
    streams = built_in._streams(None)
    capacities = {
        kind: {s: tokens_of(text) // 512 for (k, s), text in streams.items() if k == kind} for kind in WEIGHTS
    }
    order = list(islice(turns(capacities), 128))
    for count in range(8, 129):
        taken = Counter(kind for kind, _ in order[:count])
        for kind, weight in WEIGHTS.items():
            assert taken[kind] >= 1 and abs(taken[kind] - count * weight / sum(WEIGHTS.values())) < 2, (count, kind)
    for count in (8, 33, 128):
        assert kinds_of(built_in_windows(Marking(), count, 512)) == [kind for kind, _ in order[:count]]


def test_any_prefix_of_the_windows_covers_all_kinds():
    kinds = kinds_of(built_in_windows(Marking(), 128, 512))
    for start in range(len(kinds) - 31):
        assert set(kinds[start : start + 32]) == {*WEIGHTS}
    assert set(kinds[:8]) == {*WEIGHTS}


def test_long_windows_mix_kinds():
    windows = built_in_windows(Marking(), 16, 4096)
    assert windows.shape == (16, 4096)
    assert all(len(set(window.tolist())) >= 6 for window in windows)
    assert built_in_windows(Marking(), 1, 700).shape == (1, 700)


def test_streams_take_turns_and_are_read_to_their_ends():
    order = list(turns({"code": {"a": 3, "b": 1, "c": 3}, "dialogue": {"d": 1}}))
    assert [stream for kind, stream in order if kind == "code"] == ["a", "b", "c", "a", "c", "a", "c"]
    assert order[:2] == [("code", "a"), ("dialogue", "d")] and len(order) == 8


def test_a_request_for_more_than_there_is_gives_all_of_it():
    windows = built_in_windows(Tokenizer(), 10**6, 512)
    assert 128 <= len(windows) < 1000
    assert built_in_windows(Tokenizer(), 4, 10**7).shape == (0, 10**7)
    with pytest.raises(CalibrationError, match="shorter than one sample"):
        token_windows(Tokenizer(), BUILT_IN, 4, 10**7, 50_000)


def test_text_and_windows_are_the_same_everywhere():
    """A change of the text, or of how windows are chosen, changes what the same command packs: CHANGELOG says so."""
    assert load_samples(Checkpoint.open(TINY_MOE), BUILT_IN, 128, 512).fingerprint() == SAMPLES


def test_a_changed_text_changes_the_fingerprint_of_the_samples(monkeypatch):
    before = load_samples(Checkpoint.open(TINY_MOE), BUILT_IN, 128, 64).fingerprint()
    original = built_in.Piece.text
    monkeypatch.setattr(built_in.Piece, "text", lambda self, tokenizer=None: original(self, tokenizer)[1:])
    assert load_samples(Checkpoint.open(TINY_MOE), BUILT_IN, 128, 64).fingerprint() != before


class Templated(Tokenizer):
    chat_template = "a template"

    def apply_chat_template(self, chat, *, tokenize):
        assert not tokenize
        if self.chat_template == "refuses":
            raise ValueError("roles must alternate")
        return "".join(f"<{message['role']}>{message['content']}" for message in chat)


def test_chats_are_rendered_by_the_template_of_the_model():
    (piece,) = (piece for piece in pieces() if piece.kind == "dialogue")
    chats = json.loads((FOLDER / piece.file).read_text(encoding="utf-8"))
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
    tokenizer, first = Templated(), chats[0][0]["content"]
    assert piece.text(tokenizer).startswith(f"<user>{first}<assistant>") and "User: " not in piece.text(tokenizer)[:500]
    assert piece.text(Tokenizer()).startswith(f"User: {first}\n\nAssistant: ")
    tokenizer.chat_template = "refuses"
    assert piece.text(tokenizer) == piece.text()


def test_excerpts_alternate_between_kinds():
    texts = built_in._streams(None)
    excerpts = list(read_texts(BUILT_IN, limit=10_000))
    kinds = [next(kind for (kind, _), text in texts.items() if excerpt in text) for excerpt in excerpts[:8]]
    assert set(kinds) == {*WEIGHTS}
    assert "".join(sorted("".join(read_texts(BUILT_IN)))) == "".join(sorted("".join(texts.values())))


def test_methods_that_need_a_text_have_one_by_default():
    needed = {"qmoe": {}, "floe": {}, "codequant": {}, "auto": {"size": "1GB"}}
    for name, given in needed.items():
        assert create(name, **given).calibration == BUILT_IN
    for name in METHODS:
        for setting in settings_of(METHODS[name]):
            if setting.name == "calibration":
                optional = type(None) in setting.types
                if optional:
                    assert setting.checked("none") is None
                else:
                    with pytest.raises(ValueError, match="calibration must not be none"):
                        setting.checked("none")
    check_source(BUILT_IN)
    check_source(OWN_SAMPLES)


def test_a_model_writes_its_own_text_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = Checkpoint.open(TINY_MOE)
    state = torch.random.get_rng_state()
    first = load_samples(checkpoint, OWN_SAMPLES, 3, 24)
    assert first.inputs.shape == (3, 24) and len(first.inputs.unique()) > 10
    assert torch.equal(state, torch.random.get_rng_state())
    (file,) = (tmp_path / "moepack" / "own").iterdir()
    monkeypatch.setattr("moepack.calibration.own._generate", None)
    assert load_samples(checkpoint, OWN_SAMPLES, 3, 24).fingerprint() == first.fingerprint()
    file.write_bytes(b"damaged")
    with pytest.raises(TypeError):
        load_samples(checkpoint, OWN_SAMPLES, 3, 24)


def test_a_model_that_exceeds_the_memory_writes_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("moepack.calibration.own.total_bytes", lambda: 1000)
    with pytest.raises(CalibrationError, match=r"needs the whole model in memory \(.*\), but only 1 kB"):
        load_samples(Checkpoint.open(TINY_MOE), OWN_SAMPLES, 3, 24)
