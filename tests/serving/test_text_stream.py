"""Streamed text equals the text of all tokens at once, for every kind of tokenizer and every split of the tokens."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from moepack.serving.sequence import Sequence
from moepack.serving.text.sampling import Sampling
from moepack.serving.text.stream import TextStream

TEXTS = (
    "The 1st emoji: 🙂🙂🙂 and 👩‍👩‍👧 (a family), e\u0301 and n\u0303o\u0302; 你好，世界。 שלום עולם مرحبا! "
    "It isn't , well ' quoted ' , she 's I 'm we 've they 're .  two  spaces\nlines\n\n\ttabs \ufffd end ?"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = sorted(set(TEXTS) - set(" \n\t🙂👧世ש\ufffd"))
"""Characters with their own tokens. The others need bytes, if a tokenizer has them."""
WORDS = ["the", "It", "is", "n't", "'", "'s", "'ve", ".", ",", "?", "<0x", "�", "   "]


def wrapped(tokenizer, **settings):
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é✓ ", normalized=False)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **settings)


def byte_level(**settings):
    """Like Qwen's: every byte is a token, and some words are."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("Ċ", "Ċ"), ("ï", "¿")]
    words = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, **settings)


def byte_fallback(*strips, **settings):
    """Like Mixtral's, whose decoder strips a space at the start, or Gemma's, whose decoder does not."""
    words = [*SPECIAL, *BYTES, "▁", "▁▁▁", "▁the", *LETTERS]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spelled = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spelled, *(decoders.Strip(" ", *strip) for strip in strips)])
    return wrapped(tokenizer, **settings)


def word_piece(cleanup=False, **settings):
    """Like BERT's: words are separated by spaces and continued by ##."""
    words = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    return wrapped(tokenizer, **settings)


def unigram(byte_fallback=False, **settings):
    """Like T5's, whose decoder drops the first space."""
    words = [*SPECIAL, *(BYTES if byte_fallback else []), "▁", "▁▁", "▁the", "▁'", "▁.", *WORDS, *LETTERS]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in dict.fromkeys(words)], 0, byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    fallback = [decoders.ByteFallback()] if byte_fallback else []
    tokenizer.decoder = decoders.Sequence([*fallback, decoders.Metaspace()])
    return wrapped(tokenizer, **settings)


def suffixed():
    """Like the first BPE of GPT: only the last token has no space after it."""
    words = [*SPECIAL, *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return wrapped(tokenizer)


def undecoded():
    """Without a decoder tokens are separated by spaces."""
    return wrapped(Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, "<unk>")))


class Pieces(PreTrainedTokenizer):
    """Like transformers' SentencePiece tokenizers: pieces are joined in Python, and the text is stripped."""

    def __init__(self):
        self.pieces = [*SPECIAL, "▁", "▁▁", "\n", "▁\n", *WORDS, *LETTERS]
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>")

    @property
    def vocab_size(self):
        return len(self.pieces)

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}

    def _tokenize(self, text, **others):
        return list(text.replace(" ", "▁"))

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index):
        return self.pieces[index] if index < len(self.pieces) else "<unk>"

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).replace("▁", " ").strip()


KINDS = {
    "byte-level": byte_level(),
    "byte-level that asks to be cleaned up": byte_level(clean_up_tokenization_spaces=True),
    "byte fallback": byte_fallback((1, 0)),
    "byte fallback without a strip": byte_fallback(),
    "byte fallback without a space at the end": byte_fallback((0, 1)),
    "pieces in Python, without spaces at both ends": Pieces(),
    "word piece": word_piece(),
    "word piece with its own clean-up": word_piece(cleanup=True),
    "word piece cleaned up": word_piece(clean_up_tokenization_spaces=True),
    "unigram": unigram(),
    "unigram with byte fallback": unigram(byte_fallback=True),
    "unigram cleaned up": unigram(byte_fallback=True, clean_up_tokenization_spaces=True),
    "suffixes": suffixed(),
    "no decoder": undecoded(),
}

kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)


@st.composite
def answers(draw):
    """Tokens as functions of a tokenizer: random text, random tokens, random and valid bytes, ids without a token."""
    parts = draw(
        st.lists(
            st.one_of(
                st.text(st.sampled_from(TEXTS), max_size=8),
                st.text(max_size=6),
                st.binary(max_size=6),
                st.lists(st.integers(0, 1000), max_size=12),
                st.lists(st.sampled_from([" ", "🙂", "\ufffd", "'", "n", ".", "▁"]), min_size=1, max_size=40),
            ),
            max_size=8,
        )
    )
    cuts = draw(st.lists(st.sampled_from([1, 1, 2, 3, 50]), min_size=1, max_size=5))
    return parts, cuts


def token_ids(tokenizer, part):
    if isinstance(part, bytes):
        names = [[f"<0x{byte:02X}>", bytes_to_letters()[byte]] for byte in part]
        vocabulary = tokenizer.get_vocab()
        return [vocabulary[name] for both in names for name in both if name in vocabulary]
    if isinstance(part, list) and all(isinstance(item, int) for item in part):
        return [item % (len(tokenizer) + tokenizer.is_fast) for item in part]
    return tokenizer("".join(part).encode("utf-8", "ignore").decode(), add_special_tokens=False).input_ids


def bytes_to_letters():
    """The letter of each byte in the vocabulary of byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def decoded(tokenizer, ids):
    """The text of all tokens; decoders that strip spaces at the end panic without any token."""
    return tokenizer.decode(ids) if any(tokenizer.convert_ids_to_tokens(token) for token in ids) else ""


def streamed(tokenizer, ids, cuts=(1,), stop=(), hidden=()):
    stream, pieces, place = TextStream(tokenizer, stop, hidden), [], 0
    for number in range(len(ids)):
        size = cuts[number % len(cuts)]
        pieces.append(stream.put(ids[place : place + size]))
        place += size
    pieces.append(stream.end())
    assert "".join(pieces) == stream.text
    return stream


def until(text, stop):
    """The text up to the stop string that is complete first."""
    found = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    return text[: min(found)[1]] if found else text


@kinds
@settings(max_examples=80, deadline=None, derandomize=True)
@given(answer=answers())
@example(answer=(["x", *[["🙂"] * 3] * 3, "y"], [1]))
@example(answer=([b"\xf0\x9f\x99\x82\xf0\x9f\x99", "x", b"\xff\xff\xff\xff\xf0\x9f", b"\x80" * 60], [1]))
@example(answer=([" " * 40, "it 's ' ' ' ' ' . n ' t", " " * 40, "a"], [1]))
def test_pieces_join_to_the_text_of_all_tokens(tokenizer, answer):
    parts, cuts = answer
    ids = [token for part in parts for token in token_ids(tokenizer, part)]
    assert streamed(tokenizer, ids, cuts).text == decoded(tokenizer, ids)


@kinds
@settings(max_examples=30, deadline=None, derandomize=True)
@given(answer=answers(), data=st.data())
def test_stop_strings_and_hidden_tokens_are_those_of_the_whole(tokenizer, answer, data):
    parts, cuts = answer
    ids = [token for part in parts for token in token_ids(tokenizer, part)]
    hidden = data.draw(st.sets(st.sampled_from(ids), max_size=3)) if ids else set()
    whole = decoded(tokenizer, [token for token in ids if token not in hidden])
    ends = st.integers(0, max(0, len(whole) - 1))
    cut_out = st.builds(lambda start, size: whole[start : start + size] or "x", ends, st.integers(1, 6))
    stop = data.draw(st.lists(st.one_of(cut_out, st.sampled_from(["the", "\n", "🙂🙂", "zz"])), max_size=3))
    stream = streamed(tokenizer, ids, cuts, stop, hidden)
    assert stream.text == until(whole, stop)
    assert stream.stopped == any(string in whole for string in stop)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@kinds
@pytest.mark.parametrize("text", [TEXTS, b"\xff", b"\xf0\x9f", "🙂", "\ufffd", "\n"], ids=ascii)
def test_the_work_does_not_grow_with_the_text(tokenizer, text):
    part = token_ids(tokenizer, text)
    ids = (part * (4000 // len(part) + 1))[:4000] if part else []
    counting = Counting(tokenizer)
    assert streamed(counting, ids).text == decoded(tokenizer, ids)
    assert counting.decoded <= 50 * len(ids)


@kinds
def test_little_of_an_ordinary_text_is_held_back(tokenizer):
    ids = token_ids(tokenizer, TEXTS * 20)
    stream, before = TextStream(tokenizer), 0
    for number, token in enumerate(ids, 1):
        stream.put([token])
        if number % 97 == 0:
            assert len(stream.text) > before
            assert len(decoded(tokenizer, ids[:number])) - len(stream.text) <= 24
            before = len(stream.text)


@kinds
def test_an_ordinary_token_is_handed_out_at_once(tokenizer):
    """No text is delayed unless a character or a clean-up is incomplete."""
    ids = token_ids(tokenizer, "the cab")
    stream = TextStream(tokenizer)
    assert stream.put(ids) == decoded(tokenizer, ids)


def served(tokenizer, ids, **settings):
    """The pieces that a server returns if the model chooses these tokens."""
    pieces = []
    sampling = Sampling(max_new_tokens=len(ids), **settings)
    sequence = Sequence([3], sampling, pieces.append, tokenizer, frozenset({tokenizer.eos_token_id}), 60)
    for token in ids:
        if sequence.take(sequence.part(8), torch.eye(len(tokenizer))[token]):
            break
    return pieces


@kinds
def test_a_server_hands_out_the_text_of_all_tokens_without_those_of_structure(tokenizer):
    ids = token_ids(tokenizer, "The sea 🙂🙂🙂")
    pieces = served(tokenizer, [tokenizer.bos_token_id, *ids[:3], tokenizer.bos_token_id, *ids[3:]])
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    assert [piece.finish for piece in pieces if piece.finish] == ["length"]


def test_a_stop_string_in_the_last_token_ends_an_answer_though_the_token_waits():
    tokenizer = KINDS["byte fallback"]
    pieces = served(tokenizer, token_ids(tokenizer, "the\n"), stop=("\n",))
    assert "".join(piece.text for piece in pieces) == "the"
    assert pieces[-1].finish == "stop"
