//! Writing a tensor.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::decode::Register;
use super::fit::{self, Frequencies, Histogram, INTEGERS};
use super::give_off::{self, GiveOff};
use super::layout::STATE_BYTES;
use super::table::Table;
use super::{BLOCK_ROWS, LANES, Layout, MAX_LOW_BITS, QUAD, invalid, planes, trellis};
use crate::Result;
use crate::simd::{self, Isa, vectorized};
use crate::types::Shape;

/// Streams that tables are fitted to, at most.
const SAMPLE: usize = 256;
/// Bits a weight from which on low bits are tried, and the share of the bits that they must save.
const DENSE: (f64, f64) = (4.0, 0.002);
/// Codes of a larger magnitude are refused.
const LARGEST: i32 = 1 << 30;
/// What no symbol is.
const NONE: u8 = u8::MAX;

/// The type of the codes that are given.
pub trait Code: Copy + Default + Send + Sync + PartialOrd + Into<i32> + From<i8> {
    /// The low byte.
    fn low(self) -> u8;
    /// The code without so many of its low bits.
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
                // Bit 1 of a dependent code says whether it is mirrored. No branch: every other one would be mispredicted.
                let mirror = -(self >> 1 & 1);
                ((self ^ mirror) - mirror) >> 2
            }
        }
    };
}

code!(i8);
code!(i16);
code!(i32);

/// Encodes `codes`, E x R x C, none beyond 2^30 in magnitude. `scales` are E x R, or one for the whole tensor, and finite;
/// they are stored in bf16 if it holds all of them exactly, otherwise in f32. Streams code 16 or 64 rows, by default what
/// suits the columns. Codes have no low bits.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error): a size, code or scale is out of range; the message names the row.
pub fn encode<T: Code>(
    codes: &[T],
    scales: &[f32],
    shape: Shape,
    stream_rows: Option<usize>,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    encode_with_low_bits(codes, scales, shape, stream_rows, 0, pool)
}

/// As [`encode`], with as many low bits of codes, at most `low_bits`, as leave the fewest bytes.
///
/// # Errors
/// As [`encode`]; more than [`MAX_LOW_BITS`].
pub fn encode_with_low_bits<T: Code>(
    codes: &[T],
    scales: &[f32],
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
    encode_as(codes, scales, Layout::new(shape, stream_rows)?, low_bits, pool)
}

/// As [`encode`], of dependent codes ([`super::trellis`]).
///
/// # Errors
/// As [`encode`]; codes of a row that follow no path of states.
pub fn encode_dependent<T: Code>(
    codes: &[T],
    scales: &[f32],
    shape: Shape,
    stream_rows: Option<usize>,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    let mut layout = Layout::new(shape, stream_rows)?;
    layout.dependent = true;
    encode_as(codes, scales, layout, 0, pool)
}

fn encode_as<T: Code>(
    codes: &[T],
    scales: &[f32],
    mut layout: Layout,
    low_bits: usize,
    pool: &ThreadPool,
) -> Result<Vec<u8>> {
    let shape = layout.shape;
    let counted =
        shape.weights() == Some(codes.len()) && (scales.len() == 1 || shape.all_rows() == Some(scales.len()));
    if !counted {
        let (codes, scales) = (codes.len(), scales.len());
        return invalid(format!("{codes} codes and {scales} scales for {shape:?}"));
    }
    if let Some(row) = scales.iter().position(|scale| !scale.is_finite()) {
        return invalid(format!("scale {} of row {row} is not finite", scales[row]));
    }
    layout.row_scales = scales.len() != 1;
    layout.wide_scales = scales
        .iter()
        .any(|&scale| half::bf16::from_f32(scale).to_f32() != scale);
    let isa = simd::active()?;
    pool.install(|| {
        let mut source = Source { codes, layout, isa };
        source.layout.low_bits = source.best_low_bits(low_bits);
        let layout = source.layout;
        let tables = source.tables();
        let streams = source.encode_all(&tables)?;
        Ok(assemble(layout, scales, &tables, &streams))
    })
}

/// An encoded stream.
struct Stream {
    /// States and renormalization bytes.
    bytes: Vec<u8>,
    /// Bit planes.
    planes: Vec<u8>,
    table: usize,
    /// Places, ascending, and differences.
    exceptions: Vec<(u32, i32)>,
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

    /// The first row, among all experts' rows, of a row block of a stream, whose number among all streams is given.
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

    /// The codes of a stream, counted without so many low bits.
    fn histogram(&self, stream: usize, low_bits: usize) -> Histogram {
        let blocks = (0..self.layout.blocks).map(|block| self.block(stream, block));
        match self.layout.dependent {
            true => Histogram::new(blocks, |code: T| code.index().into()),
            false => Histogram::new(blocks, |code: T| code.into() >> low_bits),
        }
    }

    /// Histograms of streams that are spread evenly over the tensor.
    fn sample(&self, low_bits: usize) -> Vec<Histogram> {
        let streams = self.streams();
        let count = streams.min(SAMPLE);
        let sample = (0..count).into_par_iter();
        sample
            .map(|i| self.histogram(i * streams / count, low_bits))
            .collect()
    }

    /// The low bits, at most so many, that leave the fewest bits; none where a table holds nearly all codes.
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

    /// Tables fitted to a sample.
    fn tables(&self) -> Vec<Frequencies> {
        let sample = self.sample(self.layout.low_bits);
        let weight = self.streams() as f64 / sample.len().max(1) as f64;
        fit::tables(&sample, weight, self.layout.dependent)
    }

    fn encode_all(&self, tables: &[Frequencies]) -> Result<Vec<Stream>> {
        let coders: Option<Vec<Coder>> = tables.iter().map(|table| table.table().map(Coder::new)).collect();
        let Some(coders) = coders else {
            return invalid("no table fits");
        };
        let costs: Vec<_> = tables.iter().map(Frequencies::costs).collect();
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

    /// What streams code of a row's codes; `None` of dependent ones that follow no path of states.
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

    /// Writes the symbols of a stream in the order of decoding; returns its exceptions.
    fn symbols(&self, stream: usize, coder: &Coder, buffers: &mut Buffers<T>) -> Result<Vec<(u32, i32)>> {
        let (quads, columns) = (self.layout.quads(), self.layout.shape.columns);
        let favourites = coder.favourites(self.layout.dependent);
        let (favourite, shift) = (favourites[0], self.layout.shift());
        let Buffers {
            symbols, row, high, ..
        } = buffers;
        symbols.clear();
        symbols.resize(self.layout.blocks * quads, Register([favourite; LANES]));
        row.clear();
        row.resize(quads * QUAD, favourite);
        let mut exceptions = Vec::new();
        for (block, registers) in symbols.chunks_exact_mut(quads).enumerate() {
            for (number, codes) in self.block(stream, block).chunks_exact(columns).enumerate() {
                let wrong = |what: &str| {
                    let row = self.first_row(stream, block) + number;
                    invalid(format!("{what} in row {row} of all experts'"))
                };
                let Some(integers) = self.integers(codes, high) else {
                    return wrong("dependent codes follow no path of states");
                };
                if coder.look_up(integers, row) {
                    for (column, integer) in take_out(integers, row, favourites) {
                        if !(-LARGEST..=LARGEST).contains(&(integer << shift)) {
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

/// Replaces what is no symbol by the favourite of the integer's parity; gives the columns and integers of these places.
fn take_out<T: Code>(integers: &[T], symbols: &mut [u8], favourites: [u8; 2]) -> Vec<(usize, i32)> {
    // They are few: most runs have none, which is found faster than places.
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

/// What a thread keeps from stream to stream.
#[derive(Default)]
struct Buffers<T> {
    symbols: Vec<Register>,
    /// What streams code of a row's codes.
    high: Vec<T>,
    /// The symbols of a row.
    row: Vec<u8>,
    bytes: Vec<u8>,
}

/// A table as encoding needs it.
struct Coder {
    table: Table,
    /// The symbol of each integer from -128 on, or [`NONE`], which follows for all others.
    symbols: [u8; INTEGERS + 1],
    /// All integers from the lowest to the highest have slots.
    gapless: bool,
    steps: [Step; LANES],
}

impl Coder {
    fn new(table: Table) -> Coder {
        let mut coder = Coder {
            symbols: [NONE; INTEGERS + 1],
            gapless: table.frequencies[..table.count].iter().all(|&slots| slots > 0),
            steps: [Step(0); LANES],
            table,
        };
        for (i, symbol) in coder.symbols[..INTEGERS].iter_mut().enumerate() {
            *symbol = coder.table.symbol(i as i32 - 128).unwrap_or(NONE);
        }
        let slots = coder.table.frequencies.iter().zip(&coder.table.starts);
        for (step, (&frequency, &start)) in coder.steps.iter_mut().zip(slots) {
            *step = Step::new(frequency, start);
        }
        coder
    }

    /// The symbols that stand in the place of exceptions whose integers are even, and odd.
    fn favourites(&self, dependent: bool) -> [u8; 2] {
        match dependent {
            true => [0, 1].map(|parity| self.table.favourite(parity, 2)),
            false => [self.table.favourite(0, 1); 2],
        }
    }

    /// Looks up the symbols of codes; returns whether there are codes without one, whose symbol is none of the table.
    fn look_up<T: Code>(&self, codes: &[T], symbols: &mut [u8]) -> bool {
        if self.gapless {
            return self.subtract(codes, symbols);
        }
        let mut highest = 0;
        for (&code, symbol) in codes.iter().zip(symbols) {
            let index = code.into().wrapping_add(128) as u32 as usize;
            *symbol = self.symbols[index.min(INTEGERS)];
            highest = highest.max(*symbol);
        }
        highest == NONE
    }

    /// Does the same by subtracting the lowest integer.
    fn subtract<T: Code>(&self, codes: &[T], symbols: &mut [u8]) -> bool {
        let lowest = self.table.lowest();
        let highest = (i32::from(lowest) + self.table.count as i32 - 1) as i8;
        let (first, last) = (T::from(lowest), T::from(highest));
        let mut outside = false;
        for (&code, symbol) in codes.iter().zip(symbols) {
            let none = (code < first) | (code > last);
            *symbol = if none {
                NONE
            } else {
                code.low().wrapping_sub(lowest as u8)
            };
            outside |= none;
        }
        outside
    }

    /// Encodes symbols from the last to the first; lanes of rows that do not exist stay at zero.
    fn encode(
        &self,
        isa: Isa,
        buffer: &mut Vec<u8>,
        symbols: &[Register],
        blocks: usize,
        rows: impl Fn(usize) -> usize,
    ) -> Vec<u8> {
        buffer.resize((symbols.len() + 1) * LANES, 0);
        let (mut at, mut states) = (buffer.len(), [0; LANES]);
        let registers = symbols.len() / blocks;
        for (block, symbols) in symbols.chunks_exact(registers).enumerate().rev() {
            let lanes = rows(block) * QUAD;
            let silent = states[..lanes].iter_mut().filter(|state| **state == 0);
            silent.for_each(|state| *state = 256);
            let give_off = give_off::fastest(isa);
            at = take_up(
                isa,
                &self.steps,
                symbols,
                lanes,
                &mut states,
                &mut buffer[..at],
                give_off,
            );
        }
        let mut bytes = Vec::with_capacity(STATE_BYTES + buffer.len() - at);
        bytes.extend(states.map(|state| (state >> 8) as u8));
        bytes.extend(states.map(|state| state as u8));
        bytes.extend(&buffer[at..]);
        bytes
    }
}

/// How a state takes up a symbol: from the low bits up its frequency (8 bits), its first slot (8) and the reciprocal of
/// the frequency, 2^16 / frequency rounded down (16, which 2^16 is clamped to).
#[derive(Clone, Copy)]
struct Step(u32);

impl Step {
    fn new(frequency: u8, start: u8) -> Step {
        let reciprocal = (1u32 << 16) / u32::from(frequency.max(1));
        Step(u32::from(frequency) | u32::from(start) << 8 | reciprocal.min(0xffff) << 16)
    }

    /// The next state, and whether the low byte of this one is given off first.
    #[inline(always)]
    fn next(self, state: u32) -> (u32, bool) {
        let (frequency, start, reciprocal) = (self.0 & 255, self.0 >> 8 & 255, self.0 >> 16);
        let full = state >= frequency << 8;
        let kept = if full { state >> 8 } else { state };
        // The reciprocal is short by less than one, or by one where it is clamped, and the state is below 2^16: the
        // quotient is exact or one too small.
        let quotient = (kept * reciprocal) >> 16;
        let rest = kept - quotient * frequency;
        let (quotient, rest) = match rest >= frequency {
            true => (quotient + 1, rest.wrapping_sub(frequency)),
            false => (quotient, rest),
        };
        ((quotient << 8) + rest + start, full)
    }
}

vectorized! {
    /// The states of `lanes` lanes take up registers of symbols from the last to the first, and give off bytes from the
    /// end of `buffer` on, which has a place for each and 64 more; returns where these start.
    fn take_up(
        steps: &[Step; LANES],
        symbols: &[Register],
        lanes: usize,
        states: &mut [u32; LANES],
        buffer: &mut [u8],
        give_off: GiveOff,
    ) -> usize = take_up_portable;
}

#[inline(always)]
fn take_up_portable(
    steps: &[Step; LANES],
    symbols: &[Register],
    lanes: usize,
    states: &mut [u32; LANES],
    buffer: &mut [u8],
    give_off: GiveOff,
) -> usize {
    let mut at = buffer.len();
    for register in symbols.iter().rev() {
        // Steps are looked up one by one; all else is done to all lanes at once.
        let steps: [Step; LANES] = std::array::from_fn(|lane| steps[usize::from(register.0[lane]) % LANES]);
        let (mut bytes, mut marks) = ([0u8; LANES], [0u8; LANES]);
        for lane in 0..LANES {
            bytes[lane] = states[lane] as u8;
            let (state, full) = steps[lane].next(states[lane]);
            (states[lane], marks[lane]) = (state, if full { u8::MAX } else { 0 });
        }
        states[lanes..].fill(0);
        marks[lanes..].fill(0);
        let Some((_, room)) = buffer[..at].split_last_chunk_mut::<LANES>() else {
            unreachable!("there is room for all symbols and a register more");
        };
        at -= give_off(&bytes, &marks, room);
    }
    at
}

/// Puts everything into its place.
fn assemble(mut layout: Layout, scales: &[f32], tables: &[Frequencies], streams: &[Stream]) -> Vec<u8> {
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
        unreachable!("what is in memory can be counted");
    };
    let mut out = vec![0; total];
    layout.write(&mut out);
    let rows = out[sections[0].clone()].chunks_exact_mut(1 + layout.symbols);
    for (row, table) in rows.zip(tables) {
        row[0] = table.lowest as u8;
        row[1..=table.counts.len()].copy_from_slice(&table.counts);
    }
    write_scales(&layout, scales, &mut out[sections[1].clone()]);
    let entries = out[sections[2].clone()].chunks_exact_mut(layout.entry);
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
    for (bytes, &(place, difference)) in out[sections[3].clone()]
        .chunks_exact_mut(layout.exception)
        .zip(all)
    {
        let (difference, place) = (difference.to_le_bytes(), place.to_le_bytes());
        let width = if layout.exception == 4 { 1 } else { 4 };
        bytes[..width].copy_from_slice(&difference[..width]);
        bytes[width..].copy_from_slice(&place[..layout.exception - width]);
    }
    let mut payload = &mut out[sections[4].clone()];
    let places: Vec<_> = parts()
        .map(|part| (payload.split_off_mut(..part.len()), part))
        .collect();
    places.into_par_iter().for_each(|(place, part)| match place {
        Some(place) => place.copy_from_slice(part),
        None => unreachable!("the payload has room for all parts"),
    });
    out
}

fn write_scales(layout: &Layout, scales: &[f32], out: &mut [u8]) {
    for (i, &scale) in scales.iter().enumerate() {
        match layout.wide_scales {
            true => out[4 * i..4 * i + 4].copy_from_slice(&scale.to_le_bytes()),
            false => out[2 * i..2 * i + 2].copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes()),
        }
    }
}
