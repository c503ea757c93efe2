//! The steps of the AVX-512 decoder, emulated so that any x86-64 processor can test them.

use super::*;

type Bytes = [u8; LANES];

/// Selects bytes of two vectors at 7-bit positions.
fn permute(positions: &Bytes, first: &Bytes, second: &Bytes) -> Bytes {
    positions.map(|position| match usize::from(position & 127) {
        position if position < LANES => first[position],
        position => second[position - LANES],
    })
}

/// The words of a vector.
fn words(of: &Bytes) -> [u16; LANES / 2] {
    std::array::from_fn(|i| u16::from_le_bytes([of[2 * i], of[2 * i + 1]]))
}

/// The bytes of words.
fn bytes(of: [u16; LANES / 2]) -> Bytes {
    std::array::from_fn(|i| of[i / 2].to_le_bytes()[i % 2])
}

/// The products of unsigned and signed bytes, added in pairs with saturation.
fn products(a: &Bytes, b: &Bytes) -> [u16; LANES / 2] {
    std::array::from_fn(|i| {
        let terms = [2 * i, 2 * i + 1].map(|i| i32::from(a[i]) * i32::from(b[i] as i8));
        (terms[0] + terms[1]).clamp(-32768, 32767) as u16
    })
}

/// The bytes in even or odd lanes; zero in the others.
fn only(parity: usize, of: &Bytes) -> Bytes {
    std::array::from_fn(|i| if i % 2 == parity { of[i] } else { 0 })
}

/// Even lanes of one vector and odd lanes of another.
fn blend(even: &Bytes, odd: &Bytes) -> Bytes {
    std::array::from_fn(|i| if i % 2 == 0 { even[i] } else { odd[i] })
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
    let mut even = products(&high, &only(0, &frequencies));
    let mut odd = products(&high, &only(1, &frequencies));
    for (i, rest) in words(&rest).into_iter().enumerate() {
        even[i] = even[i].wrapping_add(rest & 255);
        odd[i] = odd[i].wrapping_add(rest >> 8);
    }
    let mut high_bytes = blend(&bytes(even.map(|word| word >> 8)), &bytes(odd));
    if table.wide {
        for (lane, byte) in high_bytes.iter_mut().enumerate() {
            *byte = byte.wrapping_add(if frequencies[lane] > 127 { high[lane] } else { 0 });
        }
    }
    let low_bytes = blend(&bytes(even), &bytes(odd.map(|word| word << 8)));
    let mut next = chain.bytes[chain.at..].iter();
    let mut read = 0;
    for lane in 0..LANES {
        let short = lane < 4 * chain.rows && high_bytes[lane] == 0;
        chain.high.0[lane] = if short { low_bytes[lane] } else { high_bytes[lane] };
        chain.low.0[lane] = if short {
            *next.next().unwrap()
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
