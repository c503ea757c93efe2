//! Portable Rust, one lane at a time.

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::{LANES, QUAD};

/// See [`super::decode`].
pub(super) fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    for (chain, out) in chains.iter_mut().zip(out.chunks_exact_mut(registers.max(1))) {
        out.iter_mut().for_each(|out| next(chain, out));
    }
}

fn next(chain: &mut Chain, out: &mut Register) {
    let table = chain.table;
    let mut bytes = chain.bytes[chain.at..].iter();
    let mut read = 0;
    for lane in 0..LANES {
        let slot = chain.low.0[lane];
        let symbol = table.symbols[usize::from(slot)];
        let frequency = u16::from(table.frequencies[usize::from(symbol)]);
        let rest = slot - table.starts[usize::from(symbol)];
        let state = frequency * u16::from(chain.high.0[lane]) + u16::from(rest);
        let [mut high, mut low] = state.to_be_bytes();
        if high == 0 && lane < chain.rows * QUAD {
            high = low;
            low = bytes.next().copied().unwrap_or_default();
            read += 1;
        }
        chain.high.0[lane] = high;
        chain.low.0[lane] = low;
        out.0[lane] = symbol;
    }
    chain.at = (chain.at + read).min(chain.length);
}
