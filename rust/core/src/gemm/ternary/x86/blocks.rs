//! Two to 32 tokens without lists: every slot of a word is one multiply-add per vector of tokens.
//!
//! A code takes a load of it and the previous code, a shift, two loads of an entry's halves, seven instructions that
//! extract their fields, and for each slot a level and one product per vector. Slots without a non-zero (about a
//! quarter) multiply by zero, which is cheaper than a branch. Accumulators alternate between codes and slots, which
//! hides the product latency of 4 cycles. The bound is the loads: with 16 tokens nine of 256 bits per code, 6.3
//! cycles on Zen 4.

use std::arch::x86_64::*;

use super::super::table::BlockTable;
use super::super::tile::BLOCK_ROUND;
use super::super::unit::Unit;
use super::unit_rows::{UnitRow, pair};
use super::vector::Vector;

/// Writes the outputs of a row for the only block of tokens.
#[target_feature(enable = "avx512f,avx2,fma,bmi1,bmi2")]
pub(super) fn row_avx512(unit: &Unit, row: &UnitRow, table: &BlockTable, out: &mut [f32]) {
    // SAFETY: the function has the features of the vectors.
    unsafe {
        match unit.tile.blocks()[0].lanes {
            4 => fill::<__m128, 1>(unit, row, table, out),
            8 => fill::<__m256, 1>(unit, row, table, out),
            16 => fill::<__m512, 1>(unit, row, table, out),
            _ => fill::<__m512, 2>(unit, row, table, out),
        }
    }
}

/// Writes the outputs of a row for the only block of tokens.
#[target_feature(enable = "avx2,fma,bmi1,bmi2")]
pub(super) fn row_avx2(unit: &Unit, row: &UnitRow, table: &BlockTable, out: &mut [f32]) {
    // SAFETY: the function has the features of the vectors.
    unsafe {
        match unit.tile.blocks()[0].lanes {
            4 => fill::<__m128, 1>(unit, row, table, out),
            8 => fill::<__m256, 1>(unit, row, table, out),
            16 => fill::<__m256, 2>(unit, row, table, out),
            _ => fill::<__m256, 4>(unit, row, table, out),
        }
    }
}

/// Writes the outputs of a row for the only block of tokens.
///
/// # Safety
/// The processor has the features of `V`.
#[inline(always)]
unsafe fn fill<V: Vector, const N: usize>(unit: &Unit, row: &UnitRow, table: &BlockTable, out: &mut [f32]) {
    let (negative, positive) = row.levels(unit);
    let levels = match row.swapped {
        false => [0.0, negative, positive, 0.0],
        true => [0.0, positive, negative, 0.0],
    };
    let block = &unit.tile.blocks()[0];
    let codes = row.bytes as usize;
    assert!(block.lanes == N * V::LANES && codes > 0);
    let payload = &unit.view.padded_payload()[row.start..];
    assert!(payload.len() >= codes + BLOCK_ROUND);
    let values = unit.tile.padded_values(block, BLOCK_ROUND + 1);
    // SAFETY: whole rounds after the first code read fewer than BLOCK_ROUND bytes after the row, which the payload
    // has; `values` has positions after the columns for the words of a round and of the first code.
    let sums: [V; N] = unsafe {
        match table.class_bits {
            2 => sum::<V, N, 2>(
                payload.as_ptr(),
                codes,
                table,
                &levels,
                values,
                unit.view.columns(),
            ),
            _ => sum::<V, N, 3>(
                payload.as_ptr(),
                codes,
                table,
                &levels,
                values,
                unit.view.columns(),
            ),
        }
    };
    let mut buffer = [0.0f32; 32];
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: the buffer holds a block's lanes, which are N vectors.
        unsafe { sum.store(buffer.as_mut_ptr().add(i * V::LANES)) };
    }
    out.copy_from_slice(&buffer[..out.len()]);
}

/// The outputs of a row of `n` codes (at least one) at `codes`.
///
/// # Safety
/// `codes` is readable for n + BLOCK_ROUND bytes. `table` has 256 << CLASS entries, whose offsets lie in their words and
/// whose words are at most L weights long. `values` holds `columns + (BLOCK_ROUND + 1) * L` positions of N vectors.
#[inline(always)]
unsafe fn sum<V: Vector, const N: usize, const CLASS: usize>(
    codes: *const u8,
    n: usize,
    table: &BlockTable,
    levels: &[f32; 4],
    values: &[f32],
    columns: usize,
) -> [V; N] {
    let entries = &table.entries[..256 << CLASS];
    // SAFETY: indices are below 2^(8 + CLASS). The pointer `at` is at most `columns` positions from the start when a
    // round begins, so that the round's words stay within the guaranteed positions; types are below 4.
    unsafe {
        let (mut even, mut odd) = ([[V::zero(); N]; 2], [[V::zero(); N]; 2]);
        // Volatile, so that the halves are loaded separately: extracting fields from one word takes four more
        // instructions.
        let entry = |k: usize| {
            let halves = entries.as_ptr().add(k).cast::<u32>();
            [halves.read_volatile(), halves.add(1).read_volatile()]
        };
        let end = values.as_ptr().add(columns * N * V::LANES);
        let mut at = values.as_ptr();
        let step = |[offsets, rest]: [u32; 2], sums: &mut [[V; N]; 2], at: &mut *const f32| {
            let slots = [(offsets & 0xffff, rest & 0xff), (offsets >> 16, rest >> 8 & 0xff)];
            for (slot, sums) in slots.into_iter().zip(sums) {
                let x = at.byte_add(slot.0 as usize);
                let level = V::splat(*levels.as_ptr().add(slot.1 as usize));
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = sum.add_product(level, V::load(x.add(i * V::LANES)));
                }
            }
            *at = at.byte_add((rest >> 16) as usize);
        };
        step(entry(usize::from(*codes) << CLASS), &mut even, &mut at);
        let mut from = codes;
        for _ in 0..(n - 1).div_ceil(BLOCK_ROUND) {
            at = at.min(end);
            for k in (0..BLOCK_ROUND).step_by(2) {
                // A pair is the previous code in the low byte and the code in the high byte.
                let index = |k| (pair(from.add(k)) >> (8 - CLASS)) as usize;
                step(entry(index(k)), &mut even, &mut at);
                step(entry(index(k + 1)), &mut odd, &mut at);
            }
            from = from.add(BLOCK_ROUND);
        }
        std::array::from_fn(|i| even[0][i].add(even[1][i]).add(odd[0][i].add(odd[1][i])))
    }
}
