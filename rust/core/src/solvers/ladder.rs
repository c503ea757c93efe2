//! The scale of a group of weights that explains most of its energy, out of a ladder of trial scales.
//!
//! Weights are divided by the largest magnitude of their group, multiplied by each factor of the ladder and rounded to
//! codes q. The best scale for these codes is `sum(q x) / sum(q^2)`, which explains `sum(q x)^2 / sum(q^2)` of the
//! group's energy. The first factor that explains most wins.
//!
//! python/moepack/solvers/groupwise.py has the same algorithm in torch for other devices, and is the reference of the
//! tests. Sums are added in another order there, so that another of two equally good factors may win.
//!
//! Invariants: a group's scale depends on its own weights and the ladder only, neither on its neighbours nor on the
//! number of threads or the instruction set (no products are fused, and groups are summed in the order of columns); any
//! weights, even NaN, give some scale and no panic.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::simd::{Isa, vectorized};
use crate::{Error, Result};

/// The number of rows searched together, one per lane.
const LANES: usize = 16;

/// The columns whose sums are in f32. With 8 bits, trials differ by a hundred thousandth of the energy, less than the
/// error of the f32 sum of a long row.
const PART: usize = 64;

/// A number for each row.
type Lanes = [f32; LANES];

/// The trial scales.
#[derive(Debug, Clone, Copy)]
pub struct Ladder<'a> {
    /// Multiples of weights that are divided by the largest magnitude, of either sign; at most 2^22 in magnitude.
    pub factors: &'a [f32],
    /// The smallest and the largest code.
    pub codes: [f32; 2],
}

/// Writes the best scale of each group of `group` columns, R x G, for weights of `columns` columns, R x C.
///
/// # Errors
/// [`Error::InvalidArgument`] if sizes do not match or a factor is too large.
pub fn search(
    weights: &[f32],
    columns: usize,
    group: usize,
    ladder: Ladder,
    scales: &mut [f32],
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let whole =
        group > 0 && columns > 0 && columns.is_multiple_of(group) && weights.len().is_multiple_of(columns);
    if !whole || scales.len() != weights.len() / group {
        let (weights, scales) = (weights.len(), scales.len());
        return Err(Error::InvalidArgument(format!(
            "ladder: {weights} weights in rows of {columns} and groups of {group} do not have {scales} scales"
        )));
    }
    if let Some(factor) = ladder.factors.iter().find(|&&factor| !in_range(factor)) {
        return Err(Error::InvalidArgument(format!(
            "ladder: the factor {factor} is out of range"
        )));
    }
    let (isa, groups) = (isa.vectors(), columns / group);
    let block = |x: &mut Vec<Lanes>, (weights, scales): (&[f32], &mut [f32])| {
        for number in 0..groups {
            let unit = load(x, weights, columns, number * group, group);
            let found = best(isa, x, ladder);
            for (row, scales) in scales.chunks_exact_mut(groups).enumerate() {
                scales[number] = unit[row] * found[row];
            }
        }
    };
    let (wide, narrow) = (LANES * columns, LANES * groups);
    if weights.len() <= wide {
        // Threads take longer to wake than a block to search.
        block(&mut Vec::new(), (weights, scales));
        return Ok(());
    }
    let blocks = weights.par_chunks(wide).zip(scales.par_chunks_mut(narrow));
    pool.install(|| blocks.for_each_init(Vec::new, block));
    Ok(())
}

/// Whether products with normalized weights can be rounded by a sum; false for NaN.
fn in_range(factor: f32) -> bool {
    factor.abs() <= (1 << 22) as f32
}

/// Loads a group of at most 16 rows, divided by their largest magnitudes, which it returns; missing rows are zeros, and
/// 1 stands for zero.
fn load(x: &mut Vec<Lanes>, weights: &[f32], columns: usize, first: usize, group: usize) -> Lanes {
    let mut unit = [1.0; LANES];
    x.clear();
    x.resize(group, [0.0; LANES]);
    for (row, weights) in weights.chunks_exact(columns).enumerate() {
        let weights = &weights[first..first + group];
        let largest = weights.iter().fold(0.0f32, |most, weight| most.max(weight.abs()));
        unit[row] = if largest > 0.0 { largest } else { 1.0 };
        for (x, weight) in x.iter_mut().zip(weights) {
            x[row] = weight / unit[row];
        }
    }
    unit
}

vectorized! {
    /// The best scale of each row of normalized weights.
    fn best(x: &[Lanes], ladder: Ladder) -> Lanes = best_portable;
}

#[inline(always)]
fn best_portable(x: &[Lanes], ladder: Ladder) -> Lanes {
    let (mut scales, mut most) = ([0.0; LANES], [0.0; LANES]);
    for &factor in ladder.factors {
        let (energy, share) = sums(x, factor, ladder.codes);
        for lane in 0..LANES {
            let energy = if energy[lane] > 1.0 { energy[lane] } else { 1.0 };
            let explained = share[lane] * share[lane] / energy;
            let better = explained > most[lane];
            scales[lane] = if better {
                (share[lane] / energy) as f32
            } else {
                scales[lane]
            };
            most[lane] = if better { explained } else { most[lane] };
        }
    }
    scales
}

/// The sums of q^2 and of q x of each row, for the codes q of a factor.
#[inline(always)]
fn sums(x: &[Lanes], factor: f32, [low, high]: [f32; 2]) -> ([f64; LANES], [f64; LANES]) {
    // Sums with 1.5 * 2^23 are integers, ties to even.
    const SHIFT: f32 = 12_582_912.0;
    let (mut energies, mut shares) = ([0.0; LANES], [0.0; LANES]);
    for part in x.chunks(PART) {
        let (mut energy, mut share) = ([0.0; LANES], [0.0; LANES]);
        for x in part {
            for lane in 0..LANES {
                let code = (x[lane] * factor + SHIFT) - SHIFT;
                let code = if code > low { code } else { low };
                let code = if code < high { code } else { high };
                energy[lane] += code * code;
                share[lane] += code * x[lane];
            }
        }
        for lane in 0..LANES {
            energies[lane] += f64::from(energy[lane]);
            shares[lane] += f64::from(share[lane]);
        }
    }
    (energies, shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool;
    use proptest::prelude::*;

    /// The best explained energy and its scale, in f64.
    fn naive(weights: &[f32], ladder: Ladder) -> (f64, f64) {
        let unit = weights.iter().fold(0.0f32, |most, weight| most.max(weight.abs()));
        let unit = if unit > 0.0 { unit } else { 1.0 };
        let x: Vec<f32> = weights.iter().map(|weight| weight / unit).collect();
        let trial = |factor: &f32| {
            let codes = x.iter().map(|x| {
                f64::from(
                    (x * factor)
                        .round_ties_even()
                        .clamp(ladder.codes[0], ladder.codes[1]),
                )
            });
            let energy = codes.clone().map(|code| code * code).sum::<f64>().max(1.0);
            let share: f64 = codes.zip(&x).map(|(code, &x)| code * f64::from(x)).sum();
            (share * share / energy, f64::from(unit) * share / energy)
        };
        let trials = ladder.factors.iter().map(trial);
        trials.fold(
            (0.0, 0.0),
            |best, found| if found.0 > best.0 { found } else { best },
        )
    }

    /// The energy that a scale explains, by the trial closest to it.
    fn explained(weights: &[f32], scale: f32, ladder: Ladder) -> f64 {
        let trials = ladder
            .factors
            .chunks(1)
            .map(|factors| naive(weights, Ladder { factors, ..ladder }));
        let apart = |trial: &(f64, f64)| (trial.1 - f64::from(scale)).abs();
        trials.min_by(|a, b| apart(a).total_cmp(&apart(b))).unwrap().0
    }

    fn searched(weights: &[f32], columns: usize, group: usize, ladder: Ladder, isa: Isa) -> Vec<f32> {
        let mut scales = vec![f32::NAN; weights.len() / group];
        search(
            weights,
            columns,
            group,
            ladder,
            &mut scales,
            isa,
            &pool::current().unwrap(),
        )
        .unwrap();
        scales
    }

    proptest! {
        #[test]
        fn scales_explain_most(
            rows in 0usize..40, groups in 1usize..4, group in prop_oneof![Just(1usize), Just(5), Just(16), Just(64)],
            bits in 2u32..5, seed in any::<u32>(), zeros in any::<bool>(),
        ) {
            let half = (1u32 << (bits - 1)) as f32;
            let factors: Vec<f32> = (0..10).flat_map(|i| [-1.0, 1.0].map(|sign| sign * half * (0.8 + 0.1 * i as f32))).collect();
            let ladder = Ladder { factors: &factors, codes: [-half, half - 1.0] };
            let mut state = u64::from(seed) | 1;
            let mut weights: Vec<f32> = (0..rows * groups * group)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0).powi(3)
                })
                .collect();
            if zeros && rows > 0 {
                weights[..group].fill(0.0);
            }
            let found = searched(&weights, groups * group, group, ladder, Isa::SCALAR);
            for (weights, &scale) in weights.chunks(group).zip(&found) {
                let (most, _) = naive(weights, ladder);
                prop_assert!(explained(weights, scale, ladder) >= most * (1.0 - 1e-5) || most == 0.0 && scale == 0.0);
            }
            for isa in Isa::all_available() {
                let other = searched(&weights, groups * group, group, ladder, isa);
                prop_assert!(found.iter().zip(&other).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }

    #[test]
    fn any_weights_give_scales_and_wrong_sizes_are_errors() {
        let pool = pool::current().unwrap();
        let ladder = Ladder {
            factors: &[1.0, -1.0],
            codes: [-2.0, 1.0],
        };
        let odd = [
            f32::NAN,
            f32::INFINITY,
            -f32::INFINITY,
            f32::MIN_POSITIVE / 8.0,
            f32::MAX,
            0.0,
        ];
        for isa in Isa::all_available() {
            searched(&odd, 6, 3, ladder, isa);
        }
        let check = |columns, group, factors: &[f32], scales: usize| {
            let ladder = Ladder { factors, ..ladder };
            search(
                &odd,
                columns,
                group,
                ladder,
                &mut vec![0.0; scales],
                Isa::SCALAR,
                &pool,
            )
            .is_ok()
        };
        assert!(check(6, 3, &[1.0], 2) && check(3, 3, &[], 2));
        assert!(!check(6, 4, &[1.0], 2) && !check(0, 1, &[1.0], 6) && !check(6, 0, &[1.0], 6));
        assert!(!check(6, 3, &[1.0], 3) && !check(4, 2, &[1.0], 3));
        assert!(!check(6, 3, &[f32::NAN], 2) && !check(6, 3, &[1e9], 2));
    }
}
