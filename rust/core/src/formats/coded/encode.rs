//! Encodes a tensor.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::coder::{Coder, NONE};
use super::decode::Register;
use super::fit::{self, Frequencies, Histogram};
use super::layout::STATE_BYTES;
use super::{BLOCK_ROWS, LANES, Layout, MAX_LOW_BITS, QUAD, Scales, invalid, pairs, planes, scales, trellis};
use crate::Result;
use crate::simd::{self, Isa};
use crate::types::Shape;

/// The maximum number of streams that tables are fitted to.
const SAMPLE: usize = 256;
/// The bits per weight above which low bits are tried, and the share of the bits that they must save.
const DENSE: (f64, f64) = (4.0, 0.002);
/// The largest magnitude of a code.
const LARGEST: i32 = 1 << 30;

/// The integer type of input codes.
pub trait Code: Copy + Default + Send + Sync + PartialOrd + Into<i32> + From<i8> {
    /// The low byte.
    fn low(self) -> u8;
    /// The code without its `bits` lowest bits.
    fn high(self, bits: usize) -> Self;
    /// The index of a dependent code ([`super::trellis`]).
    fn index(self) -> Self;
}

macro_rules! code {
    ($type:ty) => {
        impl Code for $type {
            fn low(self) -> u8 {
                self as u8
            }

            fn high(self, bits: usize) -> Self {
                self >> bits
            }

            fn index(self) -> Self {
                // Bit 1 of a dependent code tells whether it is mirrored. A branch would be mispredicted half of the
                // time.
                let mirror = -(self >> 1 & 1);
                ((self ^ mirror) - mirror) >> 2
            }
        }
    };
}

code!(i8);
code!(i16);
code!(i32);

/// Encodes `codes`, E x R x C, of magnitude at most 2^30. A plain slice of scales holds row scales. Streams code 16
/// or 64 rows; the default depends on the number of columns. Codes have no low bits.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if a size, code or scale is out of range; the message names the row.
pub fn encode<'a, T: Code>(
    codes: &[T],
    scales: impl Into<Scales<'a>>,
    shape: Shape,
    stream_rows: Option<usize>,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    encode_with_low_bits(codes, scales, shape, stream_rows, 0, pool)
}

/// Like [`encode`], with the number of low bits, at most `low_bits`, that gives the smallest size.
///
/// # Errors
/// As [`encode`], and if `low_bits` exceeds [`MAX_LOW_BITS`].
pub fn encode_with_low_bits<'a, T: Code>(
    codes: &[T],
    scales: impl Into<Scales<'a>>,
    shape: Shape,
    stream_rows: Option<usize>,
    low_bits: usize,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    if low_bits > MAX_LOW_BITS {
        return invalid(format!(
            "a code has at most {MAX_LOW_BITS} low bits, not {low_bits}"
        ));
    }
    encode_as(
        codes,
        scales.into(),
        Layout::new(shape, stream_rows)?,
        (low_bits, None),
        pool,
    )
}

/// Like [`encode`], with symbols of two weights ([`super::pairs`]) unless they increase the size by a larger share
/// than `more`.
///
/// # Errors
/// As [`encode`].
pub fn encode_pairs<'a, T: Code>(
    codes: &[T],
    scales: impl Into<Scales<'a>>,
    shape: Shape,
    stream_rows: Option<usize>,
    more: f64,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    let layout = Layout::new(shape, stream_rows)?;
    encode_as(codes, scales.into(), layout, (0, Some(more)), pool)
}

/// Like [`encode`] for dependent codes ([`super::trellis`]).
///
/// # Errors
/// As [`encode`], and if the codes of a row follow no path of states.
pub fn encode_dependent<'a, T: Code>(
    codes: &[T],
    scales: impl Into<Scales<'a>>,
    shape: Shape,
    stream_rows: Option<usize>,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    let mut layout = Layout::new(shape, stream_rows)?;
    layout.dependent = true;
    encode_as(codes, scales.into(), layout, (0, None), pool)
}

/// Encodes with at most `low_bits` low bits, and with symbols of two weights if they increase the size by at most a
/// given share.
fn encode_as<T: Code>(
    codes: &[T],
    scales: Scales,
    mut layout: Layout,
    (low_bits, more): (usize, Option<f64>),
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    if layout.shape.weights() != Some(codes.len()) {
        return invalid(format!("{} codes for {:?}", codes.len(), layout.shape));
    }
    scales.describe(&mut layout)?;
    let isa = simd::active()?;
    pool.install(|| {
        let mut source = Source { codes, layout, isa };
        source.layout.low_bits = source.best_low_bits(low_bits);
        let sample = source.sample(source.layout.low_bits);
        let plain = source.tables(&sample);
        let pairs = more.and_then(|more| source.pair_tables(&sample, &plain, more));
        source.layout.pairs = pairs.is_some();
        let tables = pairs.as_ref().unwrap_or(&plain);
        let streams = source.encode_all(tables, &plain)?;
        Ok(assemble(source.layout, scales, tables, &streams))
    })
}

/// An encoded stream.
pub(super) struct Stream {
    /// States and renormalization bytes.
    pub bytes: Vec<u8>,
    /// Bit planes.
    pub planes: Vec<u8>,
    pub table: usize,
    /// Positions, ascending, and differences.
    pub exceptions: Vec<(u32, i32)>,
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
        match self.layout.dependent {
            true => Histogram::new(blocks, |code: T| code.index().into()),
            false => Histogram::new(blocks, |code: T| code.into() >> low_bits),
        }
    }

    /// The streams that tables are fitted to, spread evenly over the tensor.
    fn sampled(&self) -> impl IndexedParallelIterator<Item = usize> {
        let streams = self.streams();
        let count = streams.min(SAMPLE);
        (0..count).into_par_iter().map(move |i| i * streams / count)
    }

    /// The histograms of the sampled streams.
    fn sample(&self, low_bits: usize) -> Vec<Histogram> {
        self.sampled()
            .map(|stream| self.histogram(stream, low_bits))
            .collect()
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

    /// The number of streams that each sampled stream represents.
    fn weight(&self, sample: &[Histogram]) -> f64 {
        self.streams() as f64 / sample.len().max(1) as f64
    }

    /// Fits tables to a sample.
    fn tables(&self, sample: &[Histogram]) -> Vec<Frequencies> {
        fit::tables(sample, self.weight(sample), self.layout.dependent)
    }

    /// Tables of symbols of two weights, unless they increase the size by a larger share than `more`.
    fn pair_tables(
        &self,
        sample: &[Histogram],
        plain: &[Frequencies],
        more: f64,
    ) -> Option<Vec<Frequencies>> {
        let sampled: Vec<usize> = self.sampled().collect();
        let columns = self.layout.shape.columns.max(1);
        pairs::tables(plain, sample, (self.weight(sample), more), |number, counts| {
            let blocks = (0..self.layout.blocks).map(|block| self.block(sampled[number], block));
            blocks
                .flat_map(|block| block.chunks_exact(columns))
                .for_each(|row| counts.add(row));
        })
    }

    /// Encodes all streams by `tables`; `plain`, their tables of symbols of one weight, decides which is cheapest for
    /// a stream.
    fn encode_all(&self, tables: &[Frequencies], plain: &[Frequencies]) -> Result<Vec<Stream>> {
        let coders: Option<Vec<Coder>> = tables.iter().map(|table| table.table().map(Coder::new)).collect();
        let Some(coders) = coders else {
            return invalid("no table fits the codes");
        };
        let costs: Vec<_> = plain.iter().map(Frequencies::costs).collect();
        let encoded =
            (0..self.streams())
                .into_par_iter()
                .map_init(Buffers::<T>::default, |buffers, stream| {
                    let table = match costs.len() {
                        1 => 0,
                        _ => fit::cheapest(&self.histogram(stream, self.layout.low_bits), &costs).0,
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
        let Layout { shape, low_bits, .. } = self.layout;
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
        match (self.layout.dependent, self.layout.low_bits) {
            (true, _) => trellis::indices(codes, buffer)?,
            (false, 0) => return Some(codes),
            (false, bits) => {
                buffer.clear();
                buffer.extend(codes.iter().map(|code| code.high(bits)));
            }
        }
        Some(buffer)
    }

    /// Writes the symbols of a stream in decoding order; returns its exceptions.
    fn symbols(&self, stream: usize, coder: &Coder, buffers: &mut Buffers<T>) -> Result<Vec<(u32, i32)>> {
        let (quads, columns) = (self.layout.quads(), self.layout.shape.columns);
        let (favourites, padding) = (coder.favourites(self.layout.dependent), coder.padding());
        let Buffers {
            symbols,
            row,
            joined,
            high,
            ..
        } = buffers;
        symbols.clear();
        symbols.resize(
            self.layout.blocks * self.layout.steps(),
            Register([favourites[0]; LANES]),
        );
        row.resize(self.layout.steps() * self.layout.step_columns(), padding);
        let mut exceptions = Vec::new();
        for (block, registers) in symbols.chunks_exact_mut(self.layout.steps()).enumerate() {
            for (number, codes) in self.block(stream, block).chunks_exact(columns).enumerate() {
                let wrong = |what: &str| {
                    let row = self.first_row(stream, block) + number;
                    invalid(format!("{what} in row {row}, counted over all experts"))
                };
                let Some(integers) = self.integers(codes, high) else {
                    return wrong("dependent codes follow no path of states");
                };
                row[columns..].fill(padding);
                let outside = coder.look_up(integers, row);
                let places = match &coder.pairing {
                    Some(pairing) if pairing.join(row, joined) => {
                        differing(integers, row, coder.table.lowest())
                    }
                    None if outside => take_out(integers, row, favourites),
                    _ => Vec::new(),
                };
                for (column, integer) in places {
                    if !(-LARGEST..=LARGEST).contains(&(integer << self.layout.shift())) {
                        return wrong("a code is too large");
                    }
                    let place = (block * quads + column / QUAD) * LANES + number * QUAD + column % QUAD;
                    let usual = i32::from(coder.table.lowest()) + i32::from(row[column]);
                    let mirrored = self.layout.dependent && codes[column].low() & 3 == 3;
                    let difference = if mirrored {
                        usual - integer
                    } else {
                        integer - usual
                    };
                    exceptions.push((place as u32, difference << self.layout.low_bits));
                }
                let row = if coder.pairing.is_some() { &*joined } else { &*row };
                for (symbols, register) in row.as_chunks::<QUAD>().0.iter().zip(&mut *registers) {
                    register.0.as_chunks_mut::<QUAD>().0[number] = *symbols;
                }
            }
        }
        exceptions.sort_unstable();
        Ok(exceptions)
    }
}

/// The columns and integers of a row that differ from their digits.
fn differing<T: Code>(integers: &[T], digits: &[u8], lowest: i8) -> Vec<(usize, i32)> {
    let found = integers
        .iter()
        .map(|&integer| integer.into())
        .zip(digits)
        .enumerate();
    let found = found.filter(|(_, (integer, digit))| *integer != i32::from(lowest) + i32::from(**digit));
    found.map(|(column, (integer, _))| (column, integer)).collect()
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
    /// The symbols or digits of a row.
    row: Vec<u8>,
    /// The symbols of a row's digits.
    joined: Vec<u8>,
    bytes: Vec<u8>,
}

/// Assembles the sections of a tensor.
pub(super) fn assemble(
    mut layout: Layout,
    given: Scales,
    tables: &[Frequencies],
    streams: &[Stream],
) -> Vec<u8> {
    layout.tables = tables.len();
    layout.symbols = tables.iter().map(|table| table.counts.len()).max().unwrap_or(2);
    let parts = || streams.iter().flat_map(|stream| [&stream.bytes, &stream.planes]);
    layout.payload = parts().map(Vec::len).sum();
    layout.exceptions = streams.iter().map(|stream| stream.exceptions.len()).sum();
    let long = |stream: &Stream| {
        stream.bytes.len() - STATE_BYTES > usize::from(u16::MAX)
            || stream.exceptions.len() > usize::from(u8::MAX)
    };
    let large = |&(_, difference): &(u32, i32)| i8::try_from(difference).is_err();
    layout.entry = if streams.iter().any(long) { 8 } else { 4 };
    layout.exception = if streams.iter().flat_map(|stream| &stream.exceptions).any(large) {
        8
    } else {
        4
    };
    let (Some(total), Some(sections)) = (layout.total(), layout.sections()) else {
        unreachable!("data in memory can be counted");
    };
    let mut out = vec![0; total];
    layout.write(&mut out);
    let rows = out[sections.tables.clone()].chunks_exact_mut(layout.table_bytes());
    for (row, table) in rows.zip(tables) {
        let (lowest, lists) = row.split_at_mut(1);
        lowest[0] = table.lowest as u8;
        let [first, second] = &table.digits;
        for (place, list) in lists
            .chunks_exact_mut(layout.symbols)
            .zip([&table.counts, first, second])
        {
            place[..list.len()].copy_from_slice(list);
        }
    }
    scales::write(&layout, given.rows, &mut out[sections.scales.clone()]);
    let columns = given.columns.unwrap_or_default();
    scales::write(&layout, columns, &mut out[sections.columns.clone()]);
    let entries = out[sections.index.clone()].chunks_exact_mut(layout.entry);
    for (entry, stream) in entries.zip(streams) {
        let (length, table) = ((stream.bytes.len() - STATE_BYTES) as u64, stream.table as u64);
        let exceptions = stream.exceptions.len() as u64;
        let word = match layout.entry {
            4 => length | table << 16 | exceptions << 24,
            _ => length | table << 32 | exceptions << 40,
        };
        entry.copy_from_slice(&word.to_le_bytes()[..layout.entry]);
    }
    let all = streams.iter().flat_map(|stream| &stream.exceptions);
    for (bytes, &(place, difference)) in out[sections.exceptions.clone()]
        .chunks_exact_mut(layout.exception)
        .zip(all)
    {
        let (difference, place) = (difference.to_le_bytes(), place.to_le_bytes());
        let width = if layout.exception == 4 { 1 } else { 4 };
        bytes[..width].copy_from_slice(&difference[..width]);
        bytes[width..].copy_from_slice(&place[..layout.exception - width]);
    }
    let mut payload = &mut out[sections.payload.clone()];
    let places: Vec<_> = parts()
        .map(|part| (payload.split_off_mut(..part.len()), part))
        .collect();
    places.into_par_iter().for_each(|(place, part)| match place {
        Some(place) => place.copy_from_slice(part),
        None => unreachable!("the payload has room for all parts"),
    });
    out
}
