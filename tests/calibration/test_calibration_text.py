import json
from types import SimpleNamespace

import pytest
import torch

from moepack.calibration import SpanTokens, decoder_samples, read_texts, seq2seq_samples, token_windows
from moepack.calibration.buffer import ListBuffer
from moepack.errors import CalibrationError, MoepackWarning

SPECIAL = SpanTokens(sentinels=(99, 98, 97, 96, 95), end=1, start=0)


def tokenizer(text, *, add_special_tokens, verbose):
    assert not add_special_tokens
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_windows_lie_at_even_distances_over_the_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(65 + i % 26) for i in range(100)))
    windows = token_windows(tokenizer, file, 4, 10, 200)
    ids = torch.tensor([65 + i % 26 for i in range(100)])
    assert torch.equal(windows, torch.stack([ids[start : start + 10] for start in (0, 30, 60, 90)]))


def test_a_short_text_gives_fewer_windows_and_one_at_least(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij" * 2 + "x")
    with pytest.warns(MoepackWarning, match=r"text\.txt: the text holds 2 samples of 10 tokens, but 8 were requested"):
        assert token_windows(tokenizer, file, 8, 10, 200).shape == (2, 10)
    assert token_windows(tokenizer, file, 1, 21, 200).shape == (1, 21)
    with pytest.raises(CalibrationError, match="21 tokens are less than one sample of 22"):
        token_windows(tokenizer, file, 8, 22, 200)


def test_tokens_out_of_the_vocabulary_are_refused(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("abcz")
    assert token_windows(tokenizer, file, 1, 4, 123).shape == (1, 4)
    with pytest.raises(CalibrationError, match="token 122 is outside the model's vocabulary of 122"):
        token_windows(tokenizer, file, 1, 4, 122)


def test_json_lines_arrays_and_directories(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "two", "id": 1}\n\n{"body": "three", "n": 2}\n"four"\n')
    (tmp_path / "c.json").write_text(json.dumps([{"text": "five"}]))
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "ignored.bin").write_bytes(b"\0\1")
    assert list(read_texts(tmp_path)) == ["one", "two", "three", "four", "five"]
    assert list(read_texts(tmp_path, limit=5)) == ["one", "tw"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n\t\n", "empty"),
        ("nul.txt", b"text\0text", "binary"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 text"),
        ("bad.jsonl", b'{"text": "x"}\n{oops}\n', "line 2 is not valid JSON"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
        ("deep.json", b"[" * 100_000, "line 1 is not valid JSON"),
        ("digits.jsonl", b'{"text": "x"}\n{"a": ' + b"9" * 5000 + b"}\n", "line 2 is not valid JSON"),
        ("fields.jsonl", b'{"a": "x", "b": "y"}\n', "record 1 has neither a field 'text'"),
        ("number.jsonl", b"3\n", "record 1"),
        ("surrogate.jsonl", b'{"text": "x"}\n{"text": "ab\\ud83d"}\n', "record 2 has a lone surrogate at character 2"),
    ],
)
def test_unusable_files_are_typed_errors_that_name_the_file(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CalibrationError, match=message) as caught:
        list(read_texts(tmp_path / name))
    assert caught.value.file == str(tmp_path / name)


def test_missing_sources_are_typed_errors(tmp_path):
    with pytest.raises(CalibrationError, match="no such file"):
        list(read_texts(tmp_path / "missing.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalibrationError, match=r"no \.txt"):
        list(read_texts(tmp_path / "empty"))


def test_span_corruption_loses_nothing():
    windows = torch.arange(200, 280).view(2, 40)
    samples = seq2seq_samples(windows, SPECIAL)
    for window, source, target in zip(windows, samples.inputs, samples.targets, strict=True):
        labels = [*target[1:].tolist(), 1]
        assert target[0] == 0 and source[-1] == 1
        restored = []
        for token in source[:-1].tolist():
            if token in SPECIAL.sentinels:
                start = labels.index(token) + 1
                while labels[start] >= 200:
                    restored.append(labels[start])
                    start += 1
            else:
                restored.append(token)
        assert restored == window.tolist()
    assert (samples.inputs == 99).sum() == 2 and (samples.targets >= 200).sum() == 2 * 6


def test_premasks_follow_the_paper():
    samples = seq2seq_samples(torch.arange(200, 280).view(2, 40), SPECIAL)
    sentinels = torch.tensor(SPECIAL.sentinels)
    assert torch.equal(samples.input_mask, ~torch.isin(samples.inputs, sentinels))
    predicts = torch.cat([samples.targets[:, 1:], torch.ones(2, 1, dtype=torch.int64)], dim=1)
    assert torch.equal(samples.target_mask, ~torch.isin(predicts, sentinels))
    assert seq2seq_samples(torch.arange(200, 280).view(2, 40), SPECIAL, premask=False).input_mask.all()


def test_span_corruption_is_seeded_and_its_limits_are_errors():
    windows = torch.arange(200, 280).view(2, 40)
    assert seq2seq_samples(windows, SPECIAL).fingerprint() == seq2seq_samples(windows, SPECIAL).fingerprint()
    assert seq2seq_samples(windows, SPECIAL).fingerprint() != seq2seq_samples(windows, SPECIAL, seed=1).fingerprint()
    with pytest.raises(CalibrationError, match="too short"):
        seq2seq_samples(windows[:, :6], SPECIAL)
    with pytest.raises(CalibrationError, match="6 sentinels, but the model has 5"):
        seq2seq_samples(torch.arange(200, 330).view(1, 130), SPECIAL)
    assert decoder_samples(windows).fingerprint() != decoder_samples(windows + 1).fingerprint()


def test_the_list_buffer_slices_gathers_and_adds(tmp_path):
    for file in (None, tmp_path / "buffer"):
        buffer = ListBuffer([2, 3, 3], 4, file=file)
        buffer.tokens.copy_(torch.arange(32.0).view(8, 4))
        assert len(buffer) == 3 and buffer.starts.tolist() == [0, 2, 5, 8]
        assert torch.equal(buffer.samples(1, 3), torch.arange(8.0, 32.0).view(2, 3, 4))
        assert torch.equal(buffer.gather(torch.tensor([7, 0])), buffer.tokens[[7, 0]])
        buffer.add(torch.tensor([1, 1]), torch.ones(2, 4))
        assert buffer.samples(0, 1)[0, 1].tolist() == [6, 7, 8, 9]
