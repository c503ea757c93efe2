//! Products by 2-bit group-wise weights, codes widened in registers.
//!
//! With the codes q of a row, scale s_g and offset o_g of its groups,
//! `y = sum over g of s_g * (sum of q x over g) + o_g * (sum of x over g)`: one multiplication a weight, two a group.
//!
//! Four weights share a byte, so activations are first sorted into planes: of 64 columns, those with the remainder k
//! modulo 4 become 16 neighbours. 16 bytes of codes, widened once to 16 lanes, then give plane k by a shift and a mask.
//!
//! One source serves every instruction set: the portable loop over 16 lanes, compiled again with AVX2 and with AVX-512
//! enabled. It names every addition and fuses none, so all sets give the same bits.
//!
//! Accuracy: with u = 2^-24, n columns and S = sum of |s q x| + |o x|, the error is at most (n / 16 + 12) u S.
//!
//! Codes and parameters are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::ternary::Activations;
use crate::groupwise::{CHUNK, CHUNK_BYTES, View};
use crate::simd::Isa;
use crate::{Error, Result};

const LANES: usize = CHUNK_BYTES;
const PLANES: usize = CHUNK / LANES;
/// Tokens that share the widening of a row's codes: their accumulators stay in registers.
const TOKENS: usize = 4;
/// Products of a weight and an activation that a unit of parallel work is worth: some 50 microseconds.
const UNIT_PRODUCTS: usize = 1 << 20;
const MIN_UNIT_ROWS: usize = 16;

type Chunk = [[f32; LANES]; PLANES];

/// The activations of one expert's tokens, in planes, with the sum of each group.
struct Tile {
    chunks: Vec<Chunk>,
    sums: Vec<f32>,
    tokens: usize,
    chunks_a_token: usize,
    groups: usize,
}

impl Tile {
    fn new(view: &View, x: Activations, first: usize, tokens: usize) -> Tile {
        let layout = view.layout();
        let (columns, groups) = (layout.shape().columns, layout.groups());
        let chunks_a_token = columns.div_ceil(CHUNK);
        let mut chunks = vec![[[0.0; LANES]; PLANES]; tokens * chunks_a_token];
        let mut sums = vec![0.0; tokens * groups];
        for token in 0..tokens {
            for c in 0..columns {
                let value = x.get((first + token) * columns + c);
                let at = c % CHUNK;
                chunks[token * chunks_a_token + c / CHUNK][at % PLANES][at / PLANES] = value;
                sums[token * groups + c / layout.group_size()] += value;
            }
        }
        Tile {
            chunks,
            sums,
            tokens,
            chunks_a_token,
            groups,
        }
    }
}

/// One row times `N` tokens from `first`. Written for the optimizer: arrays of 16 lanes become vectors.
#[inline(always)]
fn row_product<const N: usize>(view: &View, tile: &Tile, row: usize, first: usize, out: &mut [f32]) {
    let codes = view.row_codes(row);
    let per_group = view.layout().group_size() / CHUNK;
    let mut totals = [[0.0f32; LANES]; N];
    let mut offsets = [0.0f32; N];
    for (group, codes) in codes.chunks(per_group * CHUNK_BYTES).enumerate() {
        let mut sums = [[0.0f32; LANES]; N];
        for (c, bytes) in codes.chunks_exact(CHUNK_BYTES).enumerate() {
            let mut wide = [0u32; LANES];
            for i in 0..LANES {
                wide[i] = u32::from(bytes[i]);
            }
            for plane in 0..PLANES {
                let mut q = [0.0f32; LANES];
                for i in 0..LANES {
                    q[i] = (wide[i] >> (2 * plane) & 3) as i32 as f32;
                }
                for (t, sum) in sums.iter_mut().enumerate() {
                    let x = &tile.chunks[(first + t) * tile.chunks_a_token + group * per_group + c][plane];
                    for i in 0..LANES {
                        sum[i] += q[i] * x[i];
                    }
                }
            }
        }
        let (scale, offset) = view.parameters(row, group);
        for t in 0..N {
            for i in 0..LANES {
                totals[t][i] += scale * sums[t][i];
            }
            offsets[t] += offset * tile.sums[(first + t) * tile.groups + group];
        }
    }
    for t in 0..N {
        out[first + t] = offsets[t] + tree_sum(totals[t]);
    }
}

/// The sum of the lanes, in an order that does not depend on the instruction set.
#[inline(always)]
fn tree_sum(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn rows_product(view: &View, tile: &Tile, first_row: usize, out: &mut [f32]) {
    for (row, out) in (first_row..).zip(out.chunks_exact_mut(tile.tokens)) {
        let mut token = 0;
        while token + TOKENS <= tile.tokens {
            row_product::<TOKENS>(view, tile, row, token, out);
            token += TOKENS;
        }
        while token < tile.tokens {
            row_product::<1>(view, tile, row, token, out);
            token += 1;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn rows_avx2(view: &View, tile: &Tile, first_row: usize, out: &mut [f32]) {
    rows_product(view, tile, first_row, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn rows_avx512(view: &View, tile: &Tile, first_row: usize, out: &mut [f32]) {
    rows_product(view, tile, first_row, out);
}

/// Rows of one expert from `first_row` on, `out` is rows x tokens. `isa` must have been found available.
fn rows(isa: Isa, view: &View, tile: &Tile, first_row: usize, out: &mut [f32]) {
    match isa {
        // SAFETY: `isa.require()` in `matmul_grouped` proved that the processor runs every feature of the set, and
        // `Isa::available` tests AVX2 and FMA for `Avx2`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { rows_avx2(view, tile, first_row, out) },
        // SAFETY: as above; `Isa::available` tests AVX-512 F, BW, DQ and VL for `Avx512`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { rows_avx512(view, tile, first_row, out) },
        _ => rows_product(view, tile, first_row, out),
    }
}

/// One expert's rows `first..first + rows`, for the tokens of `tile`.
struct Unit<'a> {
    tile: &'a Tile,
    first_token: usize,
    expert: usize,
    first: usize,
    rows: usize,
}

/// y = W x with each expert's own tokens: `x` is N x C and `y` is N x R, rows sorted by expert; tokens
/// `offsets[e]..offsets[e + 1]` belong to expert e. Experts without tokens are not read. The result does not depend on
/// the instruction set or the number of threads.
///
/// # Errors
/// [`Error::InvalidArgument`] if the offsets do not ascend from 0 to N, the sizes do not match, or the processor lacks
/// `isa`.
pub fn matmul_grouped<'a>(
    view: &View,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, isa) = (x.into(), isa.require()?);
    let shape = view.layout().shape();
    check(view, x, offsets, y)?;
    let busy: Vec<usize> = (0..shape.experts)
        .filter(|&e| offsets[e] < offsets[e + 1])
        .collect();
    let tile = |&e: &usize| Tile::new(view, x, offsets[e], offsets[e + 1] - offsets[e]);
    let tiles: Vec<Tile> = busy.iter().map(tile).collect();
    let mut units = Vec::new();
    for (tile, &expert) in tiles.iter().zip(&busy) {
        let step = (UNIT_PRODUCTS / (shape.columns.max(1) * tile.tokens)).max(MIN_UNIT_ROWS);
        let unit = |first| Unit {
            tile,
            first_token: offsets[expert],
            expert,
            first,
            rows: step.min(shape.rows - first),
        };
        units.extend((0..shape.rows).step_by(step).map(unit));
    }
    let compute = |unit: &Unit| {
        let mut out = vec![0.0; unit.rows * unit.tile.tokens];
        rows(
            isa,
            view,
            unit.tile,
            unit.expert * shape.rows + unit.first,
            &mut out,
        );
        out
    };
    let outputs: Vec<Vec<f32>> = match units.len() < 2 || pool.current_num_threads() == 1 {
        true => units.iter().map(compute).collect(),
        false => pool.install(|| units.par_iter().with_max_len(1).map(compute).collect()),
    };
    for (unit, out) in units.iter().zip(outputs) {
        for (row, out) in out.chunks_exact(unit.tile.tokens).enumerate() {
            for (token, &value) in out.iter().enumerate() {
                y[(unit.first_token + token) * shape.rows + unit.first + row] = value;
            }
        }
    }
    Ok(())
}

fn check(view: &View, x: Activations, offsets: &[usize], y: &[f32]) -> Result<()> {
    let shape = view.layout().shape();
    let ascending = offsets.first() == Some(&0) && offsets.is_sorted();
    if offsets.len() != shape.experts + 1 || !ascending {
        let message = format!(
            "{} offsets for {} experts: they must ascend from 0",
            offsets.len(),
            shape.experts
        );
        return Err(Error::InvalidArgument(message));
    }
    let tokens = offsets[shape.experts];
    if tokens.checked_mul(shape.columns) != Some(x.len()) || tokens.checked_mul(shape.rows) != Some(y.len()) {
        let message = format!(
            "{} activations and {} outputs for {tokens} tokens of {shape:?}",
            x.len(),
            y.len()
        );
        return Err(Error::InvalidArgument(message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groupwise::tests::case;
    use crate::pool;

    fn sets() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.available())
    }

    fn activations(count: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7919 % 1009) as f32 / 504.0 - 1.0) * 0.7)
            .collect()
    }

    /// Each output against decoded weights in f64, within the bound of the module.
    fn hold(view: &View, x: &[f32], offsets: &[usize], y: &[f32]) {
        let shape = view.layout().shape();
        let mut weights = vec![0.0; shape.columns];
        for expert in 0..shape.experts {
            for row in 0..shape.rows {
                view.decode_values(expert * shape.rows + row, &mut weights);
                for token in offsets[expert]..offsets[expert + 1] {
                    let x = &x[token * shape.columns..][..shape.columns];
                    let products = weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                    // |s q x| + |o x| <= 5 |x|: scales and offsets of `case` are at most 1.
                    let size: f64 = x.iter().map(|&x| 5.0 * f64::from(x).abs()).sum();
                    let expected: f64 = products.sum();
                    let bound = (shape.columns as f64 / 16.0 + 14.0) * 2f64.powi(-24) * size;
                    let found = f64::from(y[token * shape.rows + row]);
                    assert!((found - expected).abs() <= bound, "{found} instead of {expected}");
                }
            }
        }
    }

    #[test]
    fn products_are_those_of_the_decoded_weights_on_every_set() {
        let pool = pool::current().unwrap();
        for (experts, rows, columns, group) in
            [(3, 5, 130, 64), (2, 40, 256, 128), (1, 3, 64, 64), (2, 1, 7, 64)]
        {
            let blob = case(experts, rows, columns, group).blob;
            let view = View::parse(&blob).unwrap();
            for counts in [[1, 0, 0], [0, 9, 2], [4, 3, 17]] {
                let mut offsets = vec![0];
                counts[..experts]
                    .iter()
                    .for_each(|n| offsets.push(offsets[offsets.len() - 1] + n));
                let x = activations(offsets[experts] * columns);
                let mut first: Option<Vec<f32>> = None;
                for isa in sets() {
                    let mut y = vec![f32::NAN; offsets[experts] * rows];
                    matmul_grouped(&view, &x[..], &offsets, &mut y, isa, &pool).unwrap();
                    hold(&view, &x, &offsets, &y);
                    assert_eq!(*first.get_or_insert_with(|| y.clone()), y, "{isa:?}");
                }
            }
        }
    }

    #[test]
    fn bf16_activations_are_their_values() {
        let pool = pool::current().unwrap();
        let blob = case(1, 6, 100, 64).blob;
        let view = View::parse(&blob).unwrap();
        let x: Vec<half::bf16> = activations(300).into_iter().map(half::bf16::from_f32).collect();
        let bits: Vec<u16> = x.iter().map(|x| x.to_bits()).collect();
        let values: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let (mut a, mut b) = (vec![0.0; 18], vec![0.0; 18]);
        matmul_grouped(&view, &bits[..], &[0, 3], &mut a, Isa::Scalar, &pool).unwrap();
        matmul_grouped(&view, &values[..], &[0, 3], &mut b, Isa::Scalar, &pool).unwrap();
        assert_eq!(a, b);
    }

    #[test]
    fn empty_tensors_and_wrong_sizes() {
        let pool = pool::current().unwrap();
        for (experts, rows, columns) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
            let blob = case(experts, rows, columns, 64).blob;
            let view = View::parse(&blob).unwrap();
            let offsets: Vec<usize> = (0..=experts).collect();
            let mut y = vec![1.0; experts * rows];
            matmul_grouped(
                &view,
                &activations(experts * columns)[..],
                &offsets,
                &mut y,
                Isa::Scalar,
                &pool,
            )
            .unwrap();
            assert!(y.iter().all(|&y| y == 0.0));
        }
        let blob = case(2, 3, 64, 64).blob;
        let view = View::parse(&blob).unwrap();
        let x = activations(128);
        for (offsets, outputs) in [
            (vec![0, 2], 6),
            (vec![0, 2, 1], 6),
            (vec![0, 1, 2], 5),
            (vec![1, 1, 2], 6),
        ] {
            assert!(
                matmul_grouped(
                    &view,
                    &x[..],
                    &offsets,
                    &mut vec![0.0; outputs],
                    Isa::Scalar,
                    &pool
                )
                .is_err()
            );
        }
    }
}
