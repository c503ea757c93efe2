//! AVX2: half a register at a time, with several streams in rotation.
//!
//! A half takes 37 vector operations, which form a chain of some 40 to 60 cycles. Its operations must not wait in the
//! scheduler for their operands, or the scheduler is full before the processor reaches independent work. The four
//! halves of two streams therefore advance in step, operation by operation, and the states of streams are in memory,
//! which leaves the vector registers to intermediate values.
//!
//! *Symbols.* A slot's symbol is that of its bucket's first slot, plus one if the slot lies after the bucket's edge
//! (both are looked up). The outermost slots form one bucket, which has a table of its own. Other edges, which have to
//! be compared one by one, occur only at high rates.
//!
//! *States.* High bytes are multiplied by frequencies as bytes, with even and odd lanes separate. The multiplication
//! takes frequencies as signed; `WIDE` corrects the products of those above 127.
//!
//! *Bytes.* A multiplication adds the numbers of reading lanes up to each lane within four of them ([`POSITIONS`]).
//! Two steps of a shuffle and an addition extend the sums to sixteen lanes: the positions of the bytes to read.

use std::arch::x86_64::*;
use std::array::from_fn;

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::table::{BUCKET, SHIFT, Table};
use crate::formats::coded::{BLOCK_ROWS, LANES, QUAD};

/// The streams in rotation.
const ROTATION: usize = 4;
/// Bytes that are 255 or 0, read as 32 bits, are 255 times the word u of ones or zeros. As 255 * 0x01010101 is -1,
/// this factor is 0x01010101 / 255 mod 2^32, and the product is 0x01010101 u: byte i of it is the sum of u's bytes up
/// to i, at most four.
const POSITIONS: i32 = 0x0101_0101_i32.wrapping_mul(-0x0101_0101);

/// See [`super::decode`].
///
/// # Safety
/// The processor has the features; `out` has room for all registers.
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let groups = chains.chunks_mut(ROTATION);
    for (chains, out) in groups.zip(out.chunks_mut((ROTATION * registers).max(1))) {
        let tables = || chains.iter().map(|chain| chain.table);
        let banks = tables().map(|table| table.count.div_ceil(BUCKET)).max();
        let wide = tables().any(|table| table.wide);
        let more = chains.iter().any(|chain| chain.rows < BLOCK_ROWS)
            || tables().any(|table| !table.buckets.edges.is_empty());
        // SAFETY: the caller checked the processor; `out` has a chunk of `registers` registers for each chain.
        unsafe {
            match (banks, wide, more) {
                (Some(..=1), false, false) => rotate::<1, false, false>(chains, registers, out),
                (Some(..=1), true, false) => rotate::<1, true, false>(chains, registers, out),
                (Some(..=1), _, true) => rotate::<1, true, true>(chains, registers, out),
                (Some(2), false, false) => rotate::<2, false, false>(chains, registers, out),
                (Some(2), false, true) => rotate::<2, false, true>(chains, registers, out),
                (_, false, _) => rotate::<4, false, true>(chains, registers, out),
                (_, true, _) => rotate::<4, true, true>(chains, registers, out),
            }
        }
    }
}

/// Decodes at most [`ROTATION`] chains whose tables have at most `16 * BANKS` symbols. `WIDE` must be true if any
/// table has a frequency above 127, and `MORE` if any lists edges or any chain has fewer rows than a row block.
///
/// # Safety
/// The processor has the features; `out` has `registers` registers for each chain.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn rotate<const BANKS: usize, const WIDE: bool, const MORE: bool>(
    chains: &mut [Chain],
    registers: usize,
    out: &mut [Register],
) {
    let count = chains.len();
    let mut states: [States; ROTATION] = from_fn(|i| States::new(&chains[i.min(count - 1)]));
    let (pairs, single) = states[..count].as_chunks_mut::<2>();
    for register in 0..registers {
        for (number, pair) in pairs.iter_mut().enumerate() {
            // SAFETY: the caller guarantees the processor and `registers` registers in `out` for each of the `count`
            // chains, and the states belong to chains.
            unsafe {
                let out = from_fn(|i| {
                    out.as_mut_ptr()
                        .add((2 * number + i) * registers + register)
                        .cast()
                });
                step::<2, BANKS, WIDE, MORE>(pair, out)
            }
        }
        for state in single.as_chunks_mut::<1>().0 {
            let out = [out[(count - 1) * registers + register].0.as_mut_ptr().cast()];
            // SAFETY: guaranteed by the caller; the states are those of chains.
            unsafe { step::<1, BANKS, WIDE, MORE>(state, out) }
        }
    }
    for (chain, state) in chains.iter_mut().zip(&states) {
        state.store(chain);
    }
}

/// A chain with its states in halves.
///
/// Invariants: `at <= length`, and at least `length + 64` bytes are readable at `bytes`.
struct States<'a> {
    high: [__m256i; 2],
    low: [__m256i; 2],
    table: &'a Table,
    /// Masks of the lanes that read bytes.
    active: [__m256i; 2],
    bytes: *const u8,
    length: usize,
    at: usize,
}

impl<'a> States<'a> {
    #[target_feature(enable = "avx2")]
    fn new(chain: &Chain<'a>) -> States<'a> {
        States {
            high: halves(&chain.high),
            low: halves(&chain.low),
            table: chain.table,
            active: active(chain.rows * QUAD),
            bytes: chain.bytes.as_ptr(),
            length: chain.length,
            at: chain.at,
        }
    }

    #[target_feature(enable = "avx2")]
    fn store(&self, chain: &mut Chain) {
        put(self.high, &mut chain.high);
        put(self.low, &mut chain.low);
        chain.at = self.at;
    }
}

/// A value for each half of each of `N` chains.
type All<const N: usize> = [[__m256i; 2]; N];

/// The values of a function of the chain and the half.
#[inline(always)]
fn all<const N: usize>(value: impl Fn(usize, usize) -> __m256i) -> All<N> {
    from_fn(|i| from_fn(|half| value(i, half)))
}

/// Decodes a register of each of `N` chains, in step.
///
/// # Safety
/// The processor has AVX2 and POPCNT; the chains' tables satisfy the conditions of [`rotate`]; a register can be
/// written to each of `out`.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
unsafe fn step<const N: usize, const BANKS: usize, const WIDE: bool, const MORE: bool>(
    states: &mut [States; N],
    out: [*mut __m256i; N],
) {
    let low = all::<N>(|i, half| states[i].low[half]);
    let symbols = symbols::<N, MORE>(states, low);
    for (out, symbols) in out.into_iter().zip(symbols) {
        // SAFETY: a register has 64 bytes and is aligned.
        unsafe {
            _mm256_store_si256(out, symbols[0]);
            _mm256_store_si256(out.add(1), symbols[1]);
        }
    }
    let frequencies = all::<N>(|i, half| look_up::<BANKS>(&states[i].table.frequencies, symbols[i][half]));
    let rests = all::<N>(|i, half| {
        _mm256_sub_epi8(
            low[i][half],
            look_up::<BANKS>(&states[i].table.starts, symbols[i][half]),
        )
    });
    let words = from_fn(|i| {
        from_fn(|half| words::<WIDE>(states[i].high[half], frequencies[i][half], rests[i][half]))
    });
    let words: [[[__m256i; 2]; 2]; N] = words;
    let high = all::<N>(|i, half| words[i][half][0]);
    let low = all::<N>(|i, half| words[i][half][1]);
    let short = all::<N>(|i, half| {
        let empty = _mm256_cmpeq_epi8(high[i][half], _mm256_setzero_si256());
        match MORE {
            true => _mm256_and_si256(empty, states[i].active[half]),
            false => empty,
        }
    });
    let positions = all::<N>(|i, half| positions(short[i][half]));
    for (i, state) in states.iter_mut().enumerate() {
        let mut at = state.at;
        for half in 0..2 {
            let (short, mask) = (short[i][half], _mm256_movemask_epi8(short[i][half]) as u32);
            let lower = (mask & 0xffff).count_ones() as usize;
            // SAFETY: `state.at <= length`, and 64 bytes follow the `length` bytes: those of this half are the
            // first 32 after at most 32 of the other half, and the upper lanes' are the first 16 after at most 16.
            let next = unsafe {
                let bytes = state.bytes.add(at);
                let [lower, upper] = [bytes, bytes.add(lower)].map(|bytes| _mm_loadu_si128(bytes.cast()));
                _mm256_shuffle_epi8(_mm256_set_m128i(upper, lower), positions[i][half])
            };
            state.high[half] = _mm256_blendv_epi8(high[i][half], low[i][half], short);
            state.low[half] = _mm256_blendv_epi8(low[i][half], next, short);
            at += mask.count_ones() as usize;
        }
        state.at = at.min(state.length);
    }
}

/// The symbols of slots.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn symbols<const N: usize, const EDGES: bool>(states: &[States; N], low: All<N>) -> All<N> {
    let slot = all::<N>(|i, half| _mm256_add_epi8(low[i][half], _mm256_set1_epi8(SHIFT as i8)));
    let bucket =
        all::<N>(|i, half| _mm256_and_si256(_mm256_srli_epi16::<4>(slot[i][half]), _mm256_set1_epi8(15)));
    let after = all::<N>(|i, half| {
        let edge = _mm256_shuffle_epi8(bank(&states[i].table.buckets.first_edges, 0), bucket[i][half]);
        _mm256_cmpgt_epi8(slot[i][half], edge)
    });
    let inner = all::<N>(|i, half| {
        let base = _mm256_shuffle_epi8(bank(&states[i].table.buckets.bases, 0), bucket[i][half]);
        _mm256_sub_epi8(base, after[i][half])
    });
    let mut symbols = all::<N>(|i, half| {
        // The highest index bit, for which lookups give zero, is clear only for the first bucket.
        let index = _mm256_adds_epu8(slot[i][half], _mm256_set1_epi8(0x70));
        _mm256_add_epi8(
            inner[i][half],
            _mm256_shuffle_epi8(bank(&states[i].table.buckets.outer, 0), index),
        )
    });
    for (i, state) in states.iter().enumerate().filter(|_| EDGES) {
        for edge in &state.table.buckets.edges {
            // SAFETY: an edge has 32 bytes.
            let edge = unsafe { _mm256_loadu_si256(edge.as_ptr().cast()) };
            symbols[i] =
                from_fn(|half| _mm256_sub_epi8(symbols[i][half], _mm256_cmpgt_epi8(slot[i][half], edge)));
        }
    }
    symbols
}

/// Looks up the entries of symbols in a table of at most `16 * BANKS`.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up<const BANKS: usize>(table: &[u8; LANES], symbols: __m256i) -> __m256i {
    let mut found = _mm256_shuffle_epi8(bank(table, 0), symbols);
    for i in 1..BANKS {
        let above = _mm256_cmpgt_epi8(symbols, _mm256_set1_epi8((BUCKET * i) as i8 - 1));
        found = _mm256_blendv_epi8(found, _mm256_shuffle_epi8(bank(table, i), symbols), above);
    }
    found
}

/// The high and the low bytes of `high * frequencies + rests`.
#[inline]
#[target_feature(enable = "avx2")]
fn words<const WIDE: bool>(high: __m256i, frequencies: __m256i, rests: __m256i) -> [__m256i; 2] {
    let (even_lanes, odd_lanes) = (_mm256_set1_epi16(255), _mm256_set1_epi16(-256));
    // One of the two products of each word is zero, and 255 * -128 and 255 * 127 fit.
    let even = _mm256_maddubs_epi16(high, _mm256_and_si256(frequencies, even_lanes));
    let odd = _mm256_maddubs_epi16(high, _mm256_and_si256(frequencies, odd_lanes));
    let even = _mm256_add_epi16(even, _mm256_and_si256(rests, even_lanes));
    let odd = _mm256_add_epi16(odd, _mm256_srli_epi16::<8>(rests));
    let mut upper = _mm256_blendv_epi8(_mm256_srli_epi16::<8>(even), odd, odd_lanes);
    if WIDE {
        // A frequency f above 127 has been taken as f - 256, so 256 times the high byte is missing.
        let negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), frequencies);
        upper = _mm256_add_epi8(upper, _mm256_and_si256(high, negative));
    }
    [
        upper,
        _mm256_blendv_epi8(even, _mm256_slli_epi16::<8>(odd), odd_lanes),
    ]
}

/// For each lane with all bits set in `short`, the number of such lanes before it among its sixteen lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn positions(short: __m256i) -> __m256i {
    // Adds the third byte of the lower four lanes to the upper four of each eight, then that of the lower eight to the
    // upper eight.
    let eights = _mm256_setr_epi32(-1, 0x0303_0303, -1, 0x0b0b_0b0b, -1, 0x0303_0303, -1, 0x0b0b_0b0b);
    let sixteens = _mm256_setr_epi32(-1, -1, 0x0707_0707, 0x0707_0707, -1, -1, 0x0707_0707, 0x0707_0707);
    let mut counts = _mm256_mullo_epi32(short, _mm256_set1_epi32(POSITIONS));
    counts = _mm256_add_epi8(counts, _mm256_shuffle_epi8(counts, eights));
    counts = _mm256_add_epi8(counts, _mm256_shuffle_epi8(counts, sixteens));
    // A set byte is -1.
    _mm256_add_epi8(counts, short)
}

/// Masks of the first `lanes` lanes.
#[target_feature(enable = "avx2")]
fn active(lanes: usize) -> [__m256i; 2] {
    static MASKS: [[u8; LANES]; 2] = [[u8::MAX; LANES], [0; LANES]];
    let from = &MASKS.as_flattened()[LANES - lanes..][..LANES];
    let from = from.as_ptr().cast::<__m256i>();
    // SAFETY: the slice has 64 bytes.
    unsafe { [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn halves(register: &Register) -> [__m256i; 2] {
    let from = register.0.as_ptr().cast::<__m256i>();
    // SAFETY: a register has 64 bytes and is aligned.
    unsafe { [_mm256_load_si256(from), _mm256_load_si256(from.add(1))] }
}

#[inline]
#[target_feature(enable = "avx2")]
fn put([first, second]: [__m256i; 2], register: &mut Register) {
    let to = register.0.as_mut_ptr().cast::<__m256i>();
    // SAFETY: a register has 64 bytes and is aligned.
    unsafe {
        _mm256_store_si256(to, first);
        _mm256_store_si256(to.add(1), second);
    }
}

/// Loads sixteen bytes of a table into both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn bank<const N: usize>(table: &[u8; N], i: usize) -> __m256i {
    let bytes: &[u8; BUCKET] = &table.as_chunks().0[i];
    // SAFETY: the slice has 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}
