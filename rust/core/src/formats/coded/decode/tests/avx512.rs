//! The steps of the AVX-512 decoder, emulated so that any x86-64 processor can test them.

use super::super::avx512::LOW;
use super::*;

type Bytes = [u8; LANES];

/// Selects bytes of two vectors at 7-bit positions.
fn permute(positions: &Bytes, first: &Bytes, second: &Bytes) -> Bytes {
    positions.map(|position| match usize::from(position & 127) {
        position if position < LANES => first[position],
        position => second[position - LANES],
    })
}

/// Interleaves bytes of two vectors: the lower or upper eight of each 16.
fn interleave(first: &Bytes, second: &Bytes, half: usize) -> Bytes {
    std::array::from_fn(|i| {
        let from = if i % 2 == 0 { first } else { second };
        from[i / 16 * 16 + 8 * half + i % 16 / 2]
    })
}

/// Combines pairs of bytes of two vectors into words by `combine`.
fn words(a: &Bytes, b: &Bytes, combine: impl Fn([u8; 2], [u8; 2]) -> u16) -> Bytes {
    let pairs = a.as_chunks::<2>().0.iter().zip(b.as_chunks::<2>().0);
    let words: Vec<u8> = pairs.flat_map(|(&a, &b)| combine(a, b).to_le_bytes()).collect();
    words.try_into().unwrap()
}

/// Runs the steps of the AVX-512 decoder on arrays, following the processor manual's definition of each instruction.
fn emulated(chain: &mut Chain) -> Register {
    let (table, high, low) = (chain.table, chain.high.0, chain.low.0);
    let part = |i: usize| -> Bytes { table.symbols[i * LANES..][..LANES].try_into().unwrap() };
    let (lower, upper) = (
        permute(&low, &part(0), &part(1)),
        permute(&low, &part(2), &part(3)),
    );
    let symbols: Bytes = std::array::from_fn(|i| if low[i] > 127 { upper[i] } else { lower[i] });
    let look_up = |of: &Bytes| symbols.map(|symbol| of[usize::from(symbol & 63)]);
    let (frequencies, starts) = (look_up(&table.frequencies), look_up(&table.starts));
    let rest: Bytes = std::array::from_fn(|i| low[i].wrapping_sub(starts[i]));
    let [first, second] = [0, 1].map(|half| match table.wide {
        true => {
            let zero = [0; LANES];
            let [high, frequencies, rest] = [&high, &frequencies, &rest].map(|v| interleave(v, &zero, half));
            let product = words(&high, &frequencies, |a, b| {
                u16::from_le_bytes(a).wrapping_mul(u16::from_le_bytes(b))
            });
            words(&product, &rest, |a, b| {
                u16::from_le_bytes(a).wrapping_add(u16::from_le_bytes(b))
            })
        }
        false => {
            let (ones, factors) = (
                interleave(&high, &[1; LANES], half),
                interleave(&frequencies, &rest, half),
            );
            words(&ones, &factors, |a, b| {
                let terms = [0, 1].map(|i| i32::from(a[i]) * i32::from(b[i] as i8));
                (terms[0] + terms[1]).clamp(-32768, 32767) as u16
            })
        }
    });
    let low_bytes = permute(&LOW.0, &first, &second);
    let high_bytes = permute(&LOW.0.map(|position| position | 1), &first, &second);
    let mut bytes = chain.bytes[chain.at..].iter();
    let mut read = 0;
    for lane in 0..LANES {
        let short = lane < 4 * chain.rows && high_bytes[lane] == 0;
        chain.high.0[lane] = if short { low_bytes[lane] } else { high_bytes[lane] };
        chain.low.0[lane] = if short {
            *bytes.next().unwrap()
        } else {
            low_bytes[lane]
        };
        read += usize::from(short);
    }
    chain.at = (chain.at + read).min(chain.length);
    Register(symbols)
}

#[test]
fn the_steps_of_avx512_decode_as_portable_rust_does() {
    let mut random = Random(2);
    for round in 0..60 {
        let table = table(&mut random, [2, 5, 20, 64][round % 4]);
        let data = random_bytes(&mut random, 900);
        let mut chain = Chain::new(&table, &data, data.len() - LANES, false);
        chain.start_block(16 - round % 5);
        let mut other = chain.clone();
        for _ in 0..30 {
            let mut wanted = [Register::ZERO];
            scalar::decode(std::slice::from_mut(&mut other), 1, &mut wanted);
            assert!(emulated(&mut chain) == wanted[0]);
            assert!(chain.high == other.high && chain.low == other.low && chain.at == other.at);
        }
    }
}
