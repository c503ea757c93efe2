//! Symbols of two weights, for low rates.
//!
//! A decoding step takes the same time at any rate. A symbol may therefore stand for the integers of two weights of a
//! lane, in consecutive registers: columns c and c + 4 of a row. They are its *digits*, counted from the lowest
//! integer of the table. Decoders take half as many steps and look up digits; later stages see the same registers as
//! without pairs. If a row block has an odd number of registers, the second digits of the last are unused.
//!
//! A table lists the pairs that are worth a slot, with the most frequent in the middle, which suits [`super::table`].
//! Any other pair takes the cheapest symbol plus an exception for each digit that differs. The limit of this scheme
//! is rare pairs, which take a slot (1/256) or exceptions. Ternary codes of 0.6 to 1.2 bits have few of them: sizes
//! are within 0.1 % of single symbols. With two more, rare integers sizes grow by up to 2 %.

use std::cmp::Reverse;
use std::collections::VecDeque;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::coder::Coder;
use super::decode::{Register, decode};
use super::encode::{Stream, assemble};
use super::fit::{self, EXCEPTION_BITS, Frequencies, Histogram, INTEGERS, RAREST};
use super::table::{SLOTS, Table};
use super::{CodedView, LANES, Layout, QUAD, Scales, corrupt};
use crate::Result;
use crate::simd::Isa;

/// The maximum number of distinct digits; a Gaussian of 1.8 bits has seven.
const LEVELS: usize = 16;
/// All digits, and one class for all other integers.
const CLASSES: usize = LEVELS + 1;
/// Pairs are not tried above this number of bits per weight: a table would list too few of them.
const MOST_BITS: f64 = 2.0;

/// Counts of each pair of digits.
pub(super) struct Counts {
    lowest: i8,
    pairs: Box<[[u32; CLASSES]; CLASSES]>,
}

impl Counts {
    /// Empty counts for the most frequent integers.
    pub fn new<'a>(streams: impl Iterator<Item = &'a Histogram>) -> Counts {
        let first = fit::heaviest(&Histogram::sum(streams), LEVELS);
        Counts {
            lowest: (first as i32 - INTEGERS as i32 / 2) as i8,
            pairs: Box::new([[0; CLASSES]; CLASSES]),
        }
    }

    /// Counts the pairs of a row.
    pub fn add<T: Copy + Into<i32>>(&mut self, row: &[T]) {
        let class = |code: T| (code.into().wrapping_sub(self.lowest.into()) as u32 as usize).min(LEVELS);
        for pairs in row.chunks(2 * QUAD) {
            let (first, second) = pairs.split_at(pairs.len().min(QUAD));
            for (&first, &second) in first.iter().zip(second) {
                self.pairs[class(first)][class(second)] += 1;
            }
        }
    }

    /// The cheapest table and the bits of all pairs by it.
    pub fn fitted(&self) -> (Frequencies, f64) {
        let mut listed: Vec<[usize; 2]> = (0..LEVELS * LEVELS)
            .map(|pair| [pair / LEVELS, pair % LEVELS])
            .collect();
        let count = |&[first, second]: &[usize; 2]| self.pairs[first][second];
        listed.sort_by_key(|pair| Reverse(count(pair)));
        let mut ordered = VecDeque::new();
        for (number, pair) in listed.into_iter().take(LANES).enumerate() {
            match number % 2 {
                0 => ordered.push_back(pair),
                _ => ordered.push_front(pair),
            }
        }
        let counts: Vec<f64> = ordered.iter().map(|pair| f64::from(count(pair))).collect();
        let total = self
            .pairs
            .as_flattened()
            .iter()
            .map(|&count| f64::from(count))
            .sum::<f64>()
            .max(1.0);
        let tries = RAREST.map(|share| {
            let slots = fit::shared_out(&counts, total * share, false);
            let table = self.listed(ordered.iter().zip(slots).filter(|(_, slots)| *slots > 0));
            let bits = self.bits(&table);
            (table, bits)
        });
        let better =
            |best: (Frequencies, f64), next: (Frequencies, f64)| if next.1 < best.1 { next } else { best };
        match tries.into_iter().reduce(better) {
            Some(best) => best,
            None => unreachable!("at least one candidate was tried"),
        }
    }

    fn listed<'a>(&self, pairs: impl Iterator<Item = (&'a [usize; 2], u8)>) -> Frequencies {
        let mut found = Frequencies {
            lowest: self.lowest,
            counts: Vec::new(),
            digits: [Vec::new(), Vec::new()],
        };
        for (pair, slots) in pairs {
            found.counts.push(slots);
            for (digits, &digit) in found.digits.iter_mut().zip(pair) {
                digits.push(digit as u8);
            }
        }
        found
    }

    fn bits(&self, table: &Frequencies) -> f64 {
        let [first, second] = &table.digits;
        let listed: Vec<_> = table
            .counts
            .iter()
            .zip(first)
            .zip(second)
            .map(|((&slots, &first), &second)| (slots, [first, second]))
            .collect();
        let bits = |pair: [usize; 2]| match self.pairs[pair[0]][pair[1]] {
            0 => 0.0,
            count => f64::from(count) * cheapest(listed.iter().copied(), pair).1,
        };
        let classes = (0..CLASSES).flat_map(|first| (0..CLASSES).map(move |second| [first, second]));
        classes.map(bits).sum()
    }
}

/// The index of the symbol that represents a pair at the lowest cost, and its cost in bits, exceptions included.
/// `symbols` gives the slots and digits of all symbols.
fn cheapest(symbols: impl Iterator<Item = (u8, [u8; 2])>, pair: [usize; 2]) -> (usize, f64) {
    let costs = symbols
        .enumerate()
        .filter(|(_, (slots, _))| *slots > 0)
        .map(|(symbol, (slots, digits))| {
            let wrong = digits
                .iter()
                .zip(pair)
                .filter(|&(&digit, wanted)| usize::from(digit) != wanted);
            let exceptions = wrong.count() as f64 * EXCEPTION_BITS;
            (symbol, (SLOTS as f64 / f64::from(slots)).log2() + exceptions)
        });
    let better = |best: (usize, f64), next: (usize, f64)| if next.1 < best.1 { next } else { best };
    costs.fold((0, f64::INFINITY), better)
}

/// The lookup of symbols by pairs of digits that encoding needs.
pub(super) struct Pairing {
    /// The symbol of each pair of classes.
    symbols: Box<[[u8; CLASSES]; CLASSES]>,
    digits: [[u8; LANES]; 2],
}

impl Pairing {
    pub fn new(table: &Table) -> Pairing {
        let listed = || {
            (0..table.count).map(|symbol| {
                (
                    table.frequencies[symbol],
                    table.digits.map(|digits| digits[symbol]),
                )
            })
        };
        let symbols = std::array::from_fn(|first| {
            std::array::from_fn(|second| cheapest(listed(), [first, second]).0 as u8)
        });
        Pairing {
            symbols: Box::new(symbols),
            digits: table.digits,
        }
    }

    /// Writes the symbols of a row's digits, which come from two registers at a time, and replaces digits by those of
    /// the symbols; returns whether any digit changed.
    pub fn join(&self, row: &mut [u8], symbols: &mut Vec<u8>) -> bool {
        let class = |digit: u8| usize::from(digit).min(LEVELS);
        let [first, second] = &self.digits;
        let mut differ = false;
        symbols.resize(row.len() / 2, 0);
        let rows = row.as_chunks_mut::<{ 2 * QUAD }>().0;
        for (pairs, symbols) in rows.iter_mut().zip(symbols.as_chunks_mut::<QUAD>().0) {
            for (lane, symbol) in symbols.iter_mut().enumerate() {
                let pair = [pairs[lane], pairs[QUAD + lane]];
                *symbol = self.symbols[class(pair[0])][class(pair[1])];
                let place = usize::from(*symbol) % LANES;
                let found = [first[place], second[place]];
                differ |= found != pair;
                [pairs[lane], pairs[QUAD + lane]] = found;
            }
        }
        differ
    }
}

/// Fits tables of pairs, unless they increase the size by a larger share than `more`. Each sampled stream represents
/// `weight` streams; `count` counts the pairs of one.
pub(super) fn tables(
    plain: &[Frequencies],
    sample: &[Histogram],
    (weight, more): (f64, f64),
    count: impl Fn(usize, &mut Counts) + Sync,
) -> Option<Vec<Frequencies>> {
    let costs: Vec<_> = plain.iter().map(Frequencies::costs).collect();
    let chosen: Vec<_> = sample
        .iter()
        .map(|stream| fit::cheapest(stream, &costs))
        .collect();
    let bits: f64 = chosen.iter().map(|(_, bits)| bits).sum();
    if more.is_finite() && bits > MOST_BITS * sample.iter().map(Histogram::weights).sum::<f64>() {
        return None;
    }
    let fitted = (0..plain.len()).into_par_iter().map(|table| {
        let members = || (0..sample.len()).filter(|&stream| chosen[stream].0 == table);
        let mut counts = Counts::new(members().map(|stream| &sample[stream]));
        members().for_each(|stream| count(stream, &mut counts));
        counts.fitted()
    });
    let (tables, of_pairs): (Vec<_>, Vec<f64>) = fitted.unzip();
    let stored = |tables: &[Frequencies]| tables.iter().map(|table| 8 * table.bytes()).sum::<usize>() as f64;
    let total = of_pairs.iter().sum::<f64>() * weight + stored(&tables);
    (total <= (1.0 + more) * (bits * weight + stored(plain))).then_some(tables)
}

/// The frequencies of the single weights in a table of pairs.
fn single(table: &Table) -> Frequencies {
    let mut counts = vec![0.0; table.levels.max(2)];
    for digits in &table.digits {
        for (&digit, &slots) in digits.iter().zip(&table.frequencies) {
            counts[usize::from(digit)] += f64::from(slots);
        }
    }
    Frequencies {
        lowest: table.lowest,
        counts: fit::shared_out(&counts, 0.0, false),
        digits: [Vec::new(), Vec::new()],
    }
}

impl CodedView<'_> {
    /// Re-encodes the tensor with one symbol per weight, for readers that support nothing else; `self` has symbols of
    /// two.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) if a table stands for a single integer, the largest of all.
    pub fn without_pairs(&self, isa: Isa, pool: &ThreadPool) -> Result<Vec<u8>> {
        let layout = Layout {
            pairs: false,
            ..self.layout()
        };
        let tables: Vec<_> = self.coded.tables.iter().map(single).collect();
        let coders: Option<Vec<Coder>> = tables.iter().map(|table| table.table().map(Coder::new)).collect();
        let Some(coders) = coders else {
            return corrupt("a table has no usable symbols");
        };
        let (rows, columns) = (self.row_scales(), self.column_scales());
        let scales = Scales {
            rows: &rows,
            columns: Some(&columns[..]),
        };
        let streams = (0..layout.shape.experts * layout.streams()).into_par_iter();
        let encoded = |buffer: &mut Vec<u8>, number: usize| {
            let rows = |block| layout.rows_of(number % layout.streams(), block);
            let mut digits = vec![Register::ZERO; layout.blocks * layout.quads()];
            let mut chain = self.chain(number);
            for (block, digits) in digits.chunks_exact_mut(layout.quads()).enumerate() {
                chain.start_block(rows(block));
                decode(isa, std::slice::from_mut(&mut chain), layout.quads(), digits);
            }
            let table = self.coded.starts[number].table;
            Stream {
                bytes: coders[table].encode(isa, buffer, &digits, layout.blocks, rows),
                planes: Vec::new(),
                table,
                exceptions: self
                    .exceptions(number)
                    .map(|exception| (exception.place as u32, exception.difference))
                    .collect(),
            }
        };
        pool.install(|| {
            let streams: Vec<Stream> = streams.map_init(Vec::new, encoded).collect();
            Ok(assemble(layout, scales, &tables, &streams))
        })
    }
}
