"""Writes mutations of the seeds and golden files: python mutate.py OUT COUNT. The same count gives the same files."""

import random
import sys
from pathlib import Path

HERE = Path(__file__).parent


def mutated(data: bytearray, random: random.Random) -> bytearray:
    """A few bytes, bits or words of the header or of anything changed; now and then the end cut off."""
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        place = random.randrange(min(len(data), random.choice([128, len(data)])))
        kind = random.randrange(3)
        if kind == 0:
            data[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[place] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])
        else:
            word = random.choice([0, 1, 2**31 - 1, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
            data[place // 8 * 8 : place // 8 * 8 + 8] = word
    return data[: random.randrange(len(data))] if random.random() < 0.05 else data


def main(out: Path, count: int) -> None:
    """Write the seeds and `count` mutations of them."""
    golden = [file for file in (HERE / "../../tests/golden").rglob("*") if file.suffix in (".bin", ".coded")]
    files = [*(HERE / "seeds").rglob("*"), *golden]
    seeds = [data for file in sorted(files) if file.is_file() and 0 < len(data := file.read_bytes()) < 1 << 16]
    chance = random.Random(0)
    for number, data in enumerate(seeds):
        (out / f"seed{number}").write_bytes(data)
    for number in range(count):
        (out / f"{number}").write_bytes(mutated(bytearray(chance.choice(seeds)), chance))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
