#[cfg(target_arch = "x86_64")]
mod avx512;

use super::*;
use crate::formats::coded::LANES;
use crate::formats::coded::table::Table;
use crate::formats::coded::tests::Random;

/// A table of `symbols` symbols, each with at least one slot.
fn table(random: &mut Random, symbols: usize) -> Table {
    let mut frequencies = vec![1u8; symbols];
    for _ in symbols..256 {
        // The first symbols get most slots.
        let symbol = random.next() as usize % symbols * (random.next() as usize % 4) / 3;
        let symbol = if frequencies[symbol] == 255 {
            symbol + 1
        } else {
            symbol
        };
        frequencies[symbol] += 1;
    }
    Table::new(-7, &frequencies).unwrap()
}

fn random_bytes(random: &mut Random, count: usize) -> Vec<u8> {
    // Some states have a high byte of zero, which no encoder writes.
    (0..count)
        .map(|_| (random.next() >> 4) as u8 * u8::from(random.next() > 1 << 27))
        .collect()
}

#[test]
fn all_sets_decode_any_bytes_alike() {
    let mut random = Random(1);
    for symbols in [2, 3, 7, 16, 17, 32, 33, 48, 64] {
        for count in 1..=9 {
            let tables: Vec<_> = (0..count).map(|_| table(&mut random, symbols)).collect();
            let data: Vec<_> = (0..count)
                .map(|i| random_bytes(&mut random, 400 + 90 * i))
                .collect();
            let chain = |i: usize| {
                let mut chain = Chain::new(&tables[i], &data[i], data[i].len() - LANES, false);
                chain.start_block(16 - i);
                chain
            };
            let decoded = |isa| {
                let (mut chains, mut out) = (
                    (0..count).map(chain).collect::<Vec<_>>(),
                    vec![Register::ZERO; 21 * count],
                );
                decode(isa, &mut chains, 21, &mut out);
                let mut more = vec![Register::ZERO; 5 * count];
                decode(isa, &mut chains, 5, &mut more);
                out.extend(more);
                (out, chains.iter().map(|chain| chain.at).collect::<Vec<_>>())
            };
            for isa in Isa::all_available() {
                assert!(
                    decoded(isa) == decoded(Isa::SCALAR),
                    "{symbols} symbols on {}",
                    isa.name()
                );
            }
        }
    }
}
