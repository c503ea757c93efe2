"""States after a model's last block, as computed by calibration and by the packed model."""

import torch

import moepack
from moepack.calibration import Calibrator


def record_streams(monkeypatch):
    """Collect the streams of hidden states of a calibration; the first is the compressed model's."""
    streams, make = [], Calibrator._stream

    def spying(*arguments):
        streams.append(make(*arguments))
        return streams[-1]

    monkeypatch.setattr(Calibrator, "_stream", spying)
    return streams


def last_states(directory, ids, mode=None):
    """The inputs of a packed decoder's last norm, [tokens, hidden], for token ids [samples, length]."""
    model, seen = moepack.load(directory, dtype=torch.float32, mode=mode), []
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        model(input_ids=ids)
    return seen[0].flatten(0, 1)
