//! Encodes a tensor.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::code::Code;
use super::coder::{Coder, NONE};
use super::fit::{self, Frequencies};
use super::histogram::Histogram;
use super::layout::Layout;
use super::register::Register;
use super::scales::Scales;
use super::stream::{Stream, assemble};
use super::symbols::Symbols;
use super::{BLOCK_ROWS, LANES, QUAD, invalid, planes, trellis};
use crate::Result;
use crate::simd::{self, Isa};
use crate::types::Shape;

/// The maximum number of streams that tables are fitted to.
const SAMPLE: usize = 256;
/// The bits per weight above which low bits are tried, and the share of the bits that they must save.
const DENSE: (f64, f64) = (4.0, 0.002);
/// The largest magnitude of a code.
const LARGEST: i32 = 1 << 30;

/// Encodes `codes`, E x R x C, of magnitude at most 2^30. A plain slice of scales holds row scales. Streams code 16
/// or 64 rows; the default depends on the number of columns. Plain symbols get at most the given number of low bits:
/// the number that gives the smallest size.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if a size, code or scale is out of range, or if the codes of a row follow
/// no path of states although symbols are dependent; the message names the row.
pub fn encode<'a, T: Code>(
    codes: &[T],
    scales: impl Into<Scales<'a>>,
    shape: Shape,
    stream_rows: Option<usize>,
    symbols: Symbols,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    let mut layout = Layout::new(shape, stream_rows, symbols)?;
    let scales = scales.into();
    if shape.weights() != Some(codes.len()) {
        return invalid(format!("{} codes for {shape:?}", codes.len()));
    }
    scales.describe(&mut layout)?;
    let isa = simd::active()?;
    pool.install(|| {
        let mut source = Source { codes, layout, isa };
        if let Symbols::Plain { low_bits } = &mut layout.symbols {
            *low_bits = source.best_low_bits(*low_bits);
        }
        source.layout = layout;
        let tables = source.tables();
        let streams = source.encode_all(&tables)?;
        Ok(assemble(layout, scales, &tables, &streams))
    })
}

struct Source<'a, T> {
    codes: &'a [T],
    layout: Layout,
    isa: Isa,
}

impl<'a, T: Code> Source<'a, T> {
    fn streams(&self) -> usize {
        self.layout.shape.experts * self.layout.streams()
    }

    /// The first row, counted over all experts, of a row block of a stream, which is counted over all experts, too.
    fn first_row(&self, stream: usize, block: usize) -> usize {
        let (expert, stream) = (stream / self.layout.streams(), stream % self.layout.streams());
        expert * self.layout.shape.rows + (stream * self.layout.blocks + block) * BLOCK_ROWS
    }

    /// The codes of a row block of a stream.
    fn block(&self, stream: usize, block: usize) -> &'a [T] {
        let columns = self.layout.shape.columns;
        match self.layout.rows_of(stream % self.layout.streams(), block) {
            0 => &[],
            rows => &self.codes[self.first_row(stream, block) * columns..][..rows * columns],
        }
    }

    /// The histogram of a stream's codes without their `low_bits` lowest bits.
    fn histogram(&self, stream: usize, low_bits: usize) -> Histogram {
        let blocks = (0..self.layout.blocks).map(|block| self.block(stream, block));
        match self.layout.symbols.is_dependent() {
            true => Histogram::new(blocks, |code: T| code.index().into()),
            false => Histogram::new(blocks, |code: T| code.into() >> low_bits),
        }
    }

    /// The histograms of the streams that tables are fitted to, spread evenly over the tensor.
    fn sample(&self, low_bits: usize) -> Vec<Histogram> {
        let streams = self.streams();
        let count = streams.min(SAMPLE);
        let sampled = (0..count).into_par_iter().map(|i| i * streams / count);
        sampled.map(|stream| self.histogram(stream, low_bits)).collect()
    }

    /// The number of low bits, at most `most`, that gives the smallest size; zero if a table holds nearly all codes.
    fn best_low_bits(&self, most: usize) -> usize {
        if most == 0 {
            return 0;
        }
        let bits = |low_bits| fit::bits_by_one_table(&self.sample(low_bits)) + low_bits as f64;
        let ((dense, worthwhile), none) = (DENSE, bits(0));
        if none < dense {
            return 0;
        }
        let tries = (1..=most).map(|low_bits| (low_bits, bits(low_bits)));
        let better = |best: (usize, f64), next: (usize, f64)| if next.1 < best.1 { next } else { best };
        tries.fold((0, none * (1.0 - worthwhile)), better).0
    }

    /// Fits tables to the sampled streams, each of which represents as many streams.
    fn tables(&self) -> Vec<Frequencies> {
        let sample = self.sample(self.layout.low_bits());
        let weight = self.streams() as f64 / sample.len().max(1) as f64;
        fit::tables(&sample, weight, self.layout.symbols.is_dependent())
    }

    /// Encodes all streams, each by the cheapest of `tables`.
    fn encode_all(&self, tables: &[Frequencies]) -> Result<Vec<Stream>> {
        let coders: Option<Vec<Coder>> = tables.iter().map(|table| table.table().map(Coder::new)).collect();
        let Some(coders) = coders else {
            return invalid("no table fits the codes");
        };
        let costs: Vec<_> = tables.iter().map(Frequencies::costs).collect();
        let encoded =
            (0..self.streams())
                .into_par_iter()
                .map_init(Buffers::<T>::default, |buffers, stream| {
                    let table = match costs.len() {
                        1 => 0,
                        _ => fit::cheapest(&self.histogram(stream, self.layout.low_bits()), &costs).0,
                    };
                    let exceptions = self.symbols(stream, &coders[table], buffers)?;
                    let rows = |block| self.layout.rows_of(stream % self.layout.streams(), block);
                    let Buffers { symbols, bytes, .. } = buffers;
                    let bytes = coders[table].encode(self.isa, bytes, symbols, self.layout.blocks, rows);
                    Ok(Stream {
                        bytes,
                        planes: self.planes(stream),
                        table,
                        exceptions,
                    })
                });
        encoded.collect()
    }

    /// The bit planes of a stream.
    fn planes(&self, stream: usize) -> Vec<u8> {
        let (shape, low_bits) = (self.layout.shape, self.layout.low_bits());
        let (mut planes, mask) = (Vec::new(), (1 << low_bits) - 1);
        let blocks = (0..self.layout.blocks).filter(|_| low_bits > 0);
        for codes in blocks
            .map(|block| self.block(stream, block))
            .filter(|codes| !codes.is_empty())
        {
            let mut lows = vec![Register::ZERO; self.layout.quads()];
            for (row, codes) in codes.chunks_exact(shape.columns).enumerate() {
                for (column, code) in codes.iter().enumerate() {
                    lows[column / QUAD].0[row * QUAD + column % QUAD] = code.low() & mask;
                }
            }
            lows.iter()
                .for_each(|lows| planes::append(lows, low_bits, &mut planes));
        }
        planes
    }

    /// The integers that streams code for a row: codes without low bits, or indices. `None` if dependent codes follow
    /// no path.
    fn integers<'c>(&self, codes: &'c [T], buffer: &'c mut Vec<T>) -> Option<&'c [T]> {
        match self.layout.symbols {
            Symbols::Dependent => trellis::indices(codes, buffer)?,
            Symbols::Plain { low_bits: 0 } => return Some(codes),
            Symbols::Plain { low_bits } => {
                buffer.clear();
                buffer.extend(codes.iter().map(|code| code.high(low_bits)));
            }
        }
        Some(buffer)
    }

    /// Writes the symbols of a stream in decoding order; returns its exceptions.
    fn symbols(&self, stream: usize, coder: &Coder, buffers: &mut Buffers<T>) -> Result<Vec<(u32, i32)>> {
        let (quads, columns) = (self.layout.quads(), self.layout.shape.columns);
        let dependent = self.layout.symbols.is_dependent();
        let (favourites, padding) = (coder.favourites(dependent), coder.padding());
        let Buffers {
            symbols, row, high, ..
        } = buffers;
        symbols.clear();
        symbols.resize(self.layout.blocks * quads, Register([favourites[0]; LANES]));
        row.resize(quads * QUAD, padding);
        let mut exceptions = Vec::new();
        for (block, registers) in symbols.chunks_exact_mut(quads).enumerate() {
            for (number, codes) in self.block(stream, block).chunks_exact(columns).enumerate() {
                let wrong = |what: &str| {
                    let row = self.first_row(stream, block) + number;
                    invalid(format!("{what} in row {row}, counted over all experts"))
                };
                let Some(integers) = self.integers(codes, high) else {
                    return wrong("dependent codes follow no path of states");
                };
                row[columns..].fill(padding);
                let places = match coder.look_up(integers, row) {
                    true => take_out(integers, row, favourites),
                    false => Vec::new(),
                };
                for (column, integer) in places {
                    if !(-LARGEST..=LARGEST).contains(&(integer << self.layout.symbols.shift())) {
                        return wrong("a code is too large");
                    }
                    let place = (block * quads + column / QUAD) * LANES + number * QUAD + column % QUAD;
                    let usual = i32::from(coder.table.lowest()) + i32::from(row[column]);
                    let mirrored = dependent && codes[column].low() & 3 == 3;
                    let difference = if mirrored {
                        usual - integer
                    } else {
                        integer - usual
                    };
                    exceptions.push((place as u32, difference << self.layout.low_bits()));
                }
                for (symbols, register) in row.as_chunks::<QUAD>().0.iter().zip(&mut *registers) {
                    register.0.as_chunks_mut::<QUAD>().0[number] = *symbols;
                }
            }
        }
        exceptions.sort_unstable();
        Ok(exceptions)
    }
}

/// Replaces entries without a symbol by the placeholder of the integer's parity; returns their columns and integers.
fn take_out<T: Code>(integers: &[T], symbols: &mut [u8], favourites: [u8; 2]) -> Vec<(usize, i32)> {
    // Most runs have none; testing a run for any is faster than finding positions.
    let runs = symbols.chunks_mut(LANES).zip(integers.chunks(LANES)).enumerate();
    let runs = runs.filter(|(_, (symbols, _))| symbols.contains(&NONE));
    runs.flat_map(|(number, (symbols, integers))| {
        let places = symbols.iter_mut().zip(integers).zip(LANES * number..);
        let none = places.filter(|((symbol, _), _)| **symbol == NONE);
        none.map(move |((symbol, &integer), column)| {
            *symbol = favourites[usize::from(integer.low() & 1)];
            (column, integer.into())
        })
    })
    .collect()
}

/// Buffers that a thread reuses for all streams.
#[derive(Default)]
struct Buffers<T> {
    symbols: Vec<Register>,
    /// The integers that streams code for a row.
    high: Vec<T>,
    /// The symbols of a row.
    row: Vec<u8>,
    bytes: Vec<u8>,
}
