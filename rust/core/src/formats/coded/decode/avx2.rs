//! AVX2: half a register at a time, two interleaved streams, with all states in vector registers.
//!
//! A slot's symbol is that of its bucket's first slot, plus one if the slot lies after the bucket's edge (both are
//! looked up), plus the contribution of the tables of the outer buckets, which is zero for all other slots. Other
//! edges, which have to be compared one by one, occur only at high rates. States are multiplied as words, with even
//! and odd lanes separate, which keeps the shuffle ports free for lookups.

use std::arch::x86_64::*;

use super::chain::Chain;
use crate::formats::coded::register::Register;
use crate::formats::coded::table::{BUCKET, Table};
use crate::formats::coded::{LANES, QUAD};

/// See [`super::decode`].
///
/// # Safety
/// The processor has the features; `out` has room for all registers.
#[target_feature(enable = "avx2,popcnt")]
pub(super) unsafe fn decode(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let pairs = chains.chunks_mut(2).zip(out.chunks_mut((2 * registers).max(1)));
    for (chains, out) in pairs {
        let edges = chains.iter().any(|chain| !chain.table.buckets.edges.is_empty());
        // SAFETY: the caller checked the processor; `out` has a chunk of `registers` registers for each chain.
        unsafe {
            match edges {
                false => pair::<false>(chains, registers, out),
                true => pair::<true>(chains, registers, out),
            }
        }
    }
}

/// Decodes one or two chains. `EDGES` must be true if any table lists edges: an empty loop costs a tenth of the time.
///
/// # Safety
/// The processor has the features; `out` has `registers` registers for each chain.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn pair<const EDGES: bool>(chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    let symbols = chains.iter().map(|chain| chain.table.count).max().unwrap_or(0);
    // SAFETY: guaranteed by the caller.
    unsafe {
        match symbols.div_ceil(BUCKET) {
            ..=1 => some::<1, EDGES>(chains, registers, out),
            2 => some::<2, EDGES>(chains, registers, out),
            _ => some::<4, EDGES>(chains, registers, out),
        }
    }
}

/// Decodes one or two chains whose tables have at most `16 * BANKS` symbols; see [`pair`].
///
/// # Safety
/// The processor has the features; `out` has `registers` registers for each chain.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn some<const BANKS: usize, const EDGES: bool>(
    chains: &mut [Chain],
    registers: usize,
    out: &mut [Register],
) {
    match chains {
        [one] => {
            let mut states = States::load(one);
            for out in &mut out[..registers] {
                // SAFETY: guaranteed by the caller.
                unsafe { states.next::<BANKS, EDGES>(one, out) }
            }
            states.store(one);
        }
        [first, second] => {
            let mut states = [States::load(first), States::load(second)];
            let (left, right) = out[..2 * registers].split_at_mut(registers);
            for (left, right) in left.iter_mut().zip(right) {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    states[0].next::<BANKS, EDGES>(first, left);
                    states[1].next::<BANKS, EDGES>(second, right);
                }
            }
            let [left, right] = states;
            left.store(first);
            right.store(second);
        }
        _ => {}
    }
}

/// The states of a chain, in halves.
///
/// Invariant: `at` is at most the chain's length.
struct States {
    high: [__m256i; 2],
    low: [__m256i; 2],
    /// Masks of the lanes that read bytes.
    active: [__m256i; 2],
    at: usize,
}

impl States {
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn load(chain: &Chain) -> States {
        States {
            high: halves(&chain.high),
            low: halves(&chain.low),
            active: active(chain.rows * QUAD),
            at: chain.at,
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn store(self, chain: &mut Chain) {
        put(self.high, &mut chain.high);
        put(self.low, &mut chain.low);
        chain.at = self.at;
    }

    /// Decodes a register.
    ///
    /// # Safety
    /// The processor has AVX2 and POPCNT; these are the chain's states, and its table satisfies the conditions of
    /// [`some`].
    #[inline(always)] // Otherwise states pass through memory between registers.
    unsafe fn next<const BANKS: usize, const EDGES: bool>(&mut self, chain: &Chain, out: &mut Register) {
        // SAFETY: `at <= length`, and 64 bytes follow the chain's `length` bytes; each half reads at most 32.
        unsafe {
            let bytes = chain.bytes.as_ptr().add(self.at);
            let (first, taken) = self.half::<BANKS, EDGES, 0>(chain.table, bytes);
            let (second, more) = self.half::<BANKS, EDGES, 1>(chain.table, bytes.add(taken));
            put([first, second], out);
            self.at = (self.at + taken + more).min(chain.length);
        }
    }

    /// Decodes half a register; returns its symbols and the number of bytes read.
    ///
    /// # Safety
    /// As for [`States::next`]; 32 bytes at `bytes` are readable.
    #[inline(always)]
    unsafe fn half<const BANKS: usize, const EDGES: bool, const HALF: usize>(
        &mut self,
        table: &Table,
        bytes: *const u8,
    ) -> (__m256i, usize) {
        let (high, low) = (self.high[HALF], self.low[HALF]);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let symbols = symbols::<EDGES>(table, low);
            let frequencies = look_up::<BANKS>(&table.frequencies, symbols);
            let rest = _mm256_sub_epi8(low, look_up::<BANKS>(&table.starts, symbols));
            let [even, odd] = states(high, frequencies, rest);
            let odd_lanes = _mm256_set1_epi16(-256);
            let low = _mm256_blendv_epi8(even, _mm256_slli_epi16::<8>(odd), odd_lanes);
            let high = _mm256_blendv_epi8(_mm256_srli_epi16::<8>(even), odd, odd_lanes);
            let empty = _mm256_cmpeq_epi8(high, _mm256_setzero_si256());
            let short = _mm256_and_si256(empty, self.active[HALF]);
            let mask = _mm256_movemask_epi8(short) as u32;
            let lower = (mask & 0xffff).count_ones() as usize;
            self.high[HALF] = _mm256_blendv_epi8(high, low, short);
            self.low[HALF] = _mm256_blendv_epi8(low, spread(short, bytes, lower), short);
            (symbols, mask.count_ones() as usize)
        }
    }
}

/// A mask of the first `lanes` lanes. It is read from memory, because compilers that see a comparison repeat it for
/// every register.
#[inline]
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

/// Returns the symbols of slots; see [`pair`].
#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn symbols<const EDGES: bool>(table: &Table, low: __m256i) -> __m256i {
    let buckets = &table.buckets;
    let bucket = _mm256_and_si256(_mm256_srli_epi16::<4>(low), _mm256_set1_epi8(15));
    let slot = _mm256_xor_si256(low, _mm256_set1_epi8(-128));
    // The highest index bit, for which lookups give zero, is clear only for the first or the last sixteen slots.
    let first = _mm256_adds_epu8(low, _mm256_set1_epi8(0x70));
    // As signed bytes, the last sixteen are at least 112.
    let last = _mm256_subs_epi8(slot, _mm256_set1_epi8(0x70));
    let edge = _mm256_shuffle_epi8(bank(&buckets.first_edges, 0), bucket);
    let base = _mm256_shuffle_epi8(bank(&buckets.bases, 0), bucket);
    let outer = _mm256_add_epi8(
        _mm256_shuffle_epi8(bank(&buckets.outer[0], 0), first),
        _mm256_shuffle_epi8(bank(&buckets.outer[1], 0), last),
    );
    let mut symbols = _mm256_sub_epi8(_mm256_add_epi8(base, outer), _mm256_cmpgt_epi8(slot, edge));
    for edge in buckets.edges.iter().filter(|_| EDGES) {
        // SAFETY: an edge has 32 bytes.
        let edge = unsafe { _mm256_loadu_si256(edge.as_ptr().cast()) };
        symbols = _mm256_sub_epi8(symbols, _mm256_cmpgt_epi8(slot, edge));
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

/// The new states `high * frequencies + rest` as words, of the even and the odd lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn states(high: __m256i, frequencies: __m256i, rest: __m256i) -> [__m256i; 2] {
    let byte = _mm256_set1_epi16(255);
    let words = |of: [__m256i; 3]| _mm256_add_epi16(_mm256_mullo_epi16(of[0], of[1]), of[2]);
    let operands = [high, frequencies, rest];
    [
        words(operands.map(|operand| _mm256_and_si256(operand, byte))),
        words(operands.map(|operand| _mm256_srli_epi16::<8>(operand))),
    ]
}

/// Loads sixteen bytes of a table into both halves.
#[inline]
#[target_feature(enable = "avx2")]
fn bank<const N: usize>(table: &[u8; N], i: usize) -> __m256i {
    let bytes: &[u8; BUCKET] = &table.as_chunks().0[i];
    // SAFETY: the slice has 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// Distributes the next bytes to the lanes with all bits set in `short`; the lower 16 lanes take `lower` of them.
///
/// # Safety
/// The processor has AVX2, and 32 bytes are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn spread(short: __m256i, bytes: *const u8, lower: usize) -> __m256i {
    // The negated number of such lanes up to each lane, within each 16.
    let mut count = _mm256_add_epi8(short, _mm256_slli_si256::<1>(short));
    count = _mm256_add_epi8(count, _mm256_slli_si256::<2>(count));
    count = _mm256_add_epi8(count, _mm256_slli_si256::<4>(count));
    count = _mm256_add_epi8(count, _mm256_slli_si256::<8>(count));
    // -n - 1 is the bitwise complement of n.
    let position = _mm256_xor_si256(count, _mm256_set1_epi8(-1));
    // SAFETY: 16 bytes are readable at both offsets, because there are at most 16 lower lanes.
    let next = unsafe {
        _mm256_set_m128i(
            _mm_loadu_si128(bytes.add(lower).cast()),
            _mm_loadu_si128(bytes.cast()),
        )
    };
    _mm256_shuffle_epi8(next, position)
}
