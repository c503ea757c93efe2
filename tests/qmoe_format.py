"""An independent encoder of the QMoE authors' format, written from the specification."""

import heapq
from functools import cache

import torch


@cache
def dictionary():
    """Pairs (first + 3 * second) to code, by the paper's algorithm 1; equal probabilities in the order of the lists."""
    symbols = [0.885, (1 - 0.885) / 2, (1 - 0.885) / 2]
    pairs = [symbols[i % 3] * symbols[i // 3] for i in range(9)]
    queue, words = [(-1.0, ())], {}
    while len(words) < 65536:
        probability, word = heapq.heappop(queue)
        if word:
            words[word] = len(words)
        if len(word) < 14:
            for i, share in enumerate(pairs):
                heapq.heappush(queue, (probability * share, (*word, i)))
    return words


def pack(symbols):
    """Words (int16) and row offsets of symbols [R, C] in {0, 1, 2}, by greedy longest matches."""
    words, codes, offsets = dictionary(), [], [0]
    for row in symbols.tolist():
        row = row + [0] * (len(row) % 2)
        pairs = [row[i] + 3 * row[i + 1] for i in range(0, len(row), 2)]
        while pairs:
            length = next(n for n in range(min(14, len(pairs)), 0, -1) if tuple(pairs[:n]) in words)
            codes.append(words[tuple(pairs[:length])])
            pairs = pairs[length:]
        offsets.append(len(codes))
    return torch.tensor(codes, dtype=torch.int32).to(torch.int16), torch.tensor(offsets, dtype=torch.int32)


def original_form(weights):
    """The authors' packing of quantized weights: codes by value, levels of the quantized row."""
    low, high = weights.min(1).values, weights.max(1).values
    symbols = torch.zeros(weights.shape, dtype=torch.int64)
    symbols[weights == low[:, None]] = 1
    symbols[weights == high[:, None]] = 2
    words, offsets = pack(symbols)
    return words, offsets, torch.stack([low, high], 1).flatten()
