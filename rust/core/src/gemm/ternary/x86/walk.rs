//! One token: codes are decoded sequentially, and every non-zero is one load-and-add of a pair of floats.
//!
//! ```text
//! pair    = the code and the one before       movzx            1 load
//! index   = pair >> (8 - class bits)          shr
//! entry   = table[index]                      mov              1 load
//! sums_a += tile[at + offset 1 ..]            movzx, vaddps    1 load
//! sums_b += tile[at + offset 2 ..]            movzx, vaddps    1 load
//! at     += bytes of the word                 shr, add
//! ```
//!
//! Nine instructions and four loads for 12.6 weights at a density of 0.115. Lane 0 of the sums is the sum of
//! activations with symbol 1, lane 1 that with symbol 2; lanes 2 and 3 are unused ([`super::super::table`] describes
//! the tile). The only dependency chain is the addition to `at`. Independent instructions of this mix would take 1.6
//! cycles per code on Zen 4; the loop takes 2.7 cycles, 2.3 with `ahead`, because the schedulers fill up with
//! instructions that wait for three dependent loads.
//!
//! `ahead` loads entries three codes before their use and pairs two codes before that, so that fewer instructions
//! wait: 8 to 13% faster on Zen 4 in the loop, 3 to 6% in whole products, 8% slower on Sapphire Rapids. The sums have
//! the same bits.
//!
//! The alternative is AVX-512 gathers: 64 codes per round, with gathered entries and activations and positions from a
//! prefix sum of the lengths. Both loops, in 10^9 weights/s at 2080 / 6144 / 768 columns: gathers 9.4 / 10.1 / 8.3
//! and this one 16.0 / 10.7 / 17.0 on Zen 4; gathers 13.4 / 14.7 / 11.8 and this one 16.4 / 12.2 / 15.5 on Sapphire
//! Rapids. No kernel uses gathers for this reason. Wide rows, for which gathers would be faster, are interleaved
//! instead: a tile of 12 bytes per column exceeds the first-level cache at some 2,500 columns, so 64 wider rows
//! advance by 128 codes each in rotation, all at about the same column: 10.7 become 15 to 16 at 6,144 columns on Zen
//! 4.

use std::arch::x86_64::*;

use super::super::lists::List;
use super::super::table::{STEP, StepTable};
use super::super::unit::Unit;
use super::unit_rows::{OTHERS, RowsByDictionary, UnitRow, pair};
use crate::formats::ternary::Code;

/// The number of codes between two checks of the position; tiles have zeros for their words, and for the first one,
/// after the columns.
pub(in super::super) const ROUND: usize = 16;

/// The number of codes by which pairs are loaded ahead with `ahead`.
const AHEAD: usize = 5;

/// The bytes that may be read after a row: those of a round minus one code and of the pairs ahead, two bytes each for
/// dict16.
const SLACK: usize = 2 * (ROUND + AHEAD);

/// Rows with more columns are interleaved.
const WIDE: usize = 2560;

/// The number of rounds by which an interleaved row advances at a time.
const TURN: usize = 8;

/// The number of interleaved rows: those of a group, whose state fits the first-level cache.
const TOGETHER: usize = 64;

/// The state of a row during its multiplication.
#[derive(Clone, Copy)]
struct Walk {
    /// The next pair of codes.
    pairs: *const u8,
    /// The tile at the first position of the next word.
    at: *const f32,
    sums: __m128,
}

/// Computes a unit into `out`, one float per row.
#[target_feature(enable = "avx2,fma,bmi1,bmi2")]
pub(super) fn rows(unit: &Unit, ahead: bool, out: &mut [f32]) {
    let sorted = RowsByDictionary::new(unit);
    for i in 0..=OTHERS {
        let rows = sorted.with_dictionary(i);
        let table = match (i, unit.view.code()) {
            _ if rows.is_empty() => continue,
            (OTHERS, Code::Fsv8) => {
                raw(unit, rows, out);
                continue;
            }
            (_, Code::Fsv8) => StepTable::fsv8(usize::from(unit.view.dictionaries()[i])),
            (_, Code::Dict16) => StepTable::dict16(),
        };
        // SAFETY: the function has the features; the constants match the table.
        unsafe {
            match (table.class_bits, table.three_slots, ahead) {
                (0, _, _) => walk_all::<0, 3, false>(unit, rows, table, out),
                (2, false, true) => walk_all::<2, 2, true>(unit, rows, table, out),
                (2, false, false) => walk_all::<2, 2, false>(unit, rows, table, out),
                (2, true, _) => walk_all::<2, 3, false>(unit, rows, table, out),
                (_, false, true) => walk_all::<3, 2, true>(unit, rows, table, out),
                (_, false, false) => walk_all::<3, 2, false>(unit, rows, table, out),
                (_, true, _) => walk_all::<3, 3, false>(unit, rows, table, out),
            }
        }
    }
}

/// Computes raw and empty rows from their lists: they are too rare for their own kernel.
fn raw(unit: &Unit, rows: &[UnitRow], out: &mut [f32]) {
    let tile = unit.tile.padded_steps(1);
    let mut list = List::default();
    for row in rows {
        list.fill(unit.view, row.codes(unit));
        let levels = list.levels(row.levels(unit));
        let product = |&item: &u32| {
            let position = (item >> 1) as usize;
            levels[(item & 1) as usize] * tile[STEP * position + STEP - 1]
        };
        out[usize::from(row.number)] = list.items().iter().map(product).sum();
    }
}

/// Computes rows of one table.
///
/// # Safety
/// The table has CLASS class bits (0: dict16) and SLOTS slots; the features of [`rows`].
#[inline(always)]
unsafe fn walk_all<const CLASS: usize, const SLOTS: usize, const LOOK_AHEAD: bool>(
    unit: &Unit,
    rows: &[UnitRow],
    table: &StepTable,
    out: &mut [f32],
) {
    let tile = unit.tile.padded_steps(ROUND + 1);
    let walker = Walker::<CLASS, SLOTS, LOOK_AHEAD> {
        table: &table.entries[..if CLASS == 0 { 1 << 16 } else { 256 << CLASS }],
        end: tile[STEP * unit.view.columns()..].as_ptr(),
    };
    if unit.view.columns() <= WIDE {
        for row in rows {
            // SAFETY: the tile has ROUND + 1 words after the columns; `start` checks the row's bytes.
            unsafe {
                let (mut walk, rounds) = walker.start(unit, row, tile);
                walker.rounds(&mut walk, rounds);
                out[usize::from(row.number)] = output(unit, row, walk.sums);
            }
        }
        return;
    }
    let mut walks: Vec<(Walk, usize)> = Vec::with_capacity(TOGETHER);
    for rows in rows.chunks(TOGETHER) {
        walks.clear();
        // SAFETY: the tile has ROUND + 1 words after the columns; the caller guarantees the features.
        walks.extend(rows.iter().map(|row| unsafe { walker.start(unit, row, tile) }));
        while walks.iter().any(|&(_, rounds)| rounds > 0) {
            for (walk, rounds) in &mut walks {
                let turn = TURN.min(*rounds);
                // SAFETY: `walk` has at least this many rounds left.
                unsafe { walker.rounds(walk, turn) };
                *rounds -= turn;
            }
        }
        for ((walk, _), row) in walks.iter().zip(rows) {
            out[usize::from(row.number)] = output(unit, row, walk.sums);
        }
    }
}

/// The output of a row whose sums are complete.
#[inline(always)]
fn output(unit: &Unit, row: &UnitRow, row_sums: __m128) -> f32 {
    let mut sums = [0.0f32; 4];
    // SAFETY: the array holds four floats.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), row_sums) };
    let (negative, positive) = row.levels(unit);
    match row.swapped {
        false => negative * sums[0] + positive * sums[1],
        true => positive * sums[0] + negative * sums[1],
    }
}

/// The inner loops for one table.
struct Walker<'a, const CLASS: usize, const SLOTS: usize, const LOOK_AHEAD: bool> {
    table: &'a [u32],
    /// The tile after the last column.
    end: *const f32,
}

impl<const CLASS: usize, const SLOTS: usize, const LOOK_AHEAD: bool> Walker<'_, CLASS, SLOTS, LOOK_AHEAD> {
    /// The bytes of a code.
    const BYTES: usize = if CLASS == 0 { 2 } else { 1 };

    /// Starts a row; returns its state and number of rounds. The first FSV8 code is decoded here, because the byte
    /// before it counts as 0.
    ///
    /// # Safety
    /// `tile` has one word after the columns; the features of [`rows`].
    #[inline(always)]
    unsafe fn start(&self, unit: &Unit, row: &UnitRow, tile: &[f32]) -> (Walk, usize) {
        let bytes = row.bytes as usize;
        let payload = &unit.view.padded_payload()[row.start..];
        // The bytes that `rounds` reads: parsed tensors have 64 after the last row.
        assert!(payload.len() >= bytes + SLACK);
        let taken = usize::from(CLASS > 0);
        let rounds = (bytes / Self::BYTES - taken).div_ceil(ROUND);
        let mut walk = Walk {
            pairs: payload.as_ptr(),
            at: tile.as_ptr(),
            // SAFETY: SSE is part of x86-64.
            sums: unsafe { _mm_setzero_ps() },
        };
        if CLASS > 0 {
            let mut sums = [walk.sums; SLOTS];
            // SAFETY: the caller guarantees the tile.
            unsafe {
                Self::step(
                    self.table[usize::from(payload[0]) << CLASS],
                    &mut walk.at,
                    &mut sums,
                )
            };
            walk.sums = Self::total(sums);
        }
        (walk, rounds)
    }

    /// The pair of the `k`-th code from `pairs`.
    ///
    /// # Safety
    /// The two bytes are readable.
    #[inline(always)]
    unsafe fn pair(pairs: *const u8, k: usize) -> u32 {
        // SAFETY: the caller guarantees two readable bytes.
        unsafe { pair(pairs.add(k * Self::BYTES)) }
    }

    /// The table entry of a pair.
    #[inline(always)]
    fn entry(&self, pair: u32) -> u32 {
        let index = if CLASS == 0 { pair } else { pair >> (8 - CLASS) };
        // Volatile, so that the compiler does not move the load to its use.
        // SAFETY: a pair has 16 bits, so the index has 8 + CLASS (16 for dict16) and is below the table's length.
        unsafe { self.table.as_ptr().add(index as usize).read_volatile() }
    }

    /// Adds a word to the sums and advances `at`.
    ///
    /// # Safety
    /// The tile has the longest word and one position more from `at`.
    #[inline(always)]
    unsafe fn step(entry: u32, at: &mut *const f32, sums: &mut [__m128; SLOTS]) {
        // SAFETY: offsets are of positions in the word, whose four floats end in the position after it.
        unsafe {
            for (slot, sum) in sums.iter_mut().enumerate() {
                let offset = entry >> (8 * slot) & 255;
                *sum = _mm_add_ps(*sum, _mm_loadu_ps(at.add(offset as usize)));
            }
            *at = match SLOTS {
                2 => at.byte_add((entry >> 16) as usize),
                _ => at.add(STEP * (entry >> 24) as usize),
            };
        }
    }

    #[inline(always)]
    fn total(sums: [__m128; SLOTS]) -> __m128 {
        // SAFETY: SSE is part of x86-64.
        sums.into_iter()
            .reduce(|a, b| unsafe { _mm_add_ps(a, b) })
            .unwrap()
    }

    /// Computes `count` rounds of a row.
    ///
    /// # Safety
    /// `count` is at most the number of rounds left of those that [`Walker::start`] returned, and the tile has
    /// ROUND + 1 words after the columns: the position is limited to the last column before each round.
    #[inline(always)]
    unsafe fn rounds(&self, walk: &mut Walk, count: usize) {
        // SAFETY: the caller guarantees that the row has the bytes of `count` rounds and of the pairs ahead, and the
        // tile the words of a round after the position, which is limited before each; SSE is part of x86-64.
        unsafe {
            let (mut pairs, mut at) = (walk.pairs, walk.at);
            let (mut even, mut odd) = ([_mm_setzero_ps(); SLOTS], [_mm_setzero_ps(); SLOTS]);
            even[0] = walk.sums;
            if LOOK_AHEAD {
                let mut entries: [u32; 3] = std::array::from_fn(|k| self.entry(Self::pair(pairs, k)));
                let mut indices: [u32; 2] = std::array::from_fn(|k| Self::pair(pairs, k + 3));
                for _ in 0..count {
                    at = at.min(self.end);
                    for k in (0..ROUND).step_by(2) {
                        let next = [self.entry(indices[0]), self.entry(indices[1])];
                        indices = [Self::pair(pairs, k + AHEAD), Self::pair(pairs, k + AHEAD + 1)];
                        Self::step(entries[0], &mut at, &mut even);
                        Self::step(entries[1], &mut at, &mut odd);
                        entries = [entries[2], next[0], next[1]];
                    }
                    pairs = pairs.add(ROUND * Self::BYTES);
                    prefetch(pairs);
                }
            } else {
                for _ in 0..count {
                    at = at.min(self.end);
                    for k in (0..ROUND).step_by(2) {
                        Self::step(self.entry(Self::pair(pairs, k)), &mut at, &mut even);
                        Self::step(self.entry(Self::pair(pairs, k + 1)), &mut at, &mut odd);
                    }
                    pairs = pairs.add(ROUND * Self::BYTES);
                    prefetch(pairs);
                }
            }
            (walk.pairs, walk.at) = (pairs, at);
            walk.sums = _mm_add_ps(Self::total(even), Self::total(odd));
        }
    }
}

/// Prefetches the codes 1 KB ahead: 2 to 5% faster with cold weights.
#[inline(always)]
fn prefetch(pairs: *const u8) {
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch(pairs.wrapping_add(1024).cast::<i8>(), _MM_HINT_T0) };
}
