//! One group of each of 16 rows at a time, one row per lane: a value of a group is a vector lane, and sums never
//! cross lanes. The loops are written over arrays; compiled for an instruction set, an array is one or two registers.

use super::grid::{Grid, Storage};
use crate::simd::vectorized;

/// The number of rows quantized together.
pub const LANES: usize = 16;

/// A number for each row.
pub type Lanes = [f32; LANES];

const ZERO: Lanes = [0.0; LANES];

/// The scale and the offset of a group of each row.
#[derive(Debug, Clone, Copy)]
pub struct Parameters {
    pub scales: Lanes,
    pub offsets: Lanes,
}

/// The shares of a group's range that initial grids cover, as in least_squares.py.
fn shares(bits: u32) -> &'static [f32] {
    match bits {
        1 => &[0.6, 0.5, 0.4],
        2 => &[1.0, 0.85, 0.75, 0.65, 0.55],
        3 => &[1.0, 0.9, 0.8, 0.7],
        _ => &[1.0, 0.9, 0.8],
    }
}

/// The shifts of the offsets of initial grids, in steps.
const PHASES: [f32; 3] = [0.0, -0.3, 0.3];

/// The columns of a group of 16 rows, and their codes and values after [`solve`].
#[derive(Debug, Default)]
pub struct Tile {
    x: Vec<Lanes>,
    codes: Vec<Lanes>,
    values: Vec<Lanes>,
}

impl Tile {
    /// Loads the columns `span` of all rows, minus `minus`; missing rows are zeros.
    pub fn load(
        &mut self,
        weights: &[f32],
        minus: Option<&[f32]>,
        columns: usize,
        span: std::ops::Range<usize>,
    ) {
        self.x.clear();
        self.x.resize(span.len(), ZERO);
        for (row, weights) in weights.chunks_exact(columns).enumerate() {
            let weights = &weights[span.clone()];
            match minus {
                None => self.x.iter_mut().zip(weights).for_each(|(x, &w)| x[row] = w),
                Some(minus) => {
                    let minus = &minus[row * columns..][span.clone()];
                    for ((x, &w), &m) in self.x.iter_mut().zip(weights).zip(minus) {
                        x[row] = w - m;
                    }
                }
            }
        }
    }

    /// Stores the codes of a row and the residual, the weights minus their values; returns the residual's squared
    /// norm.
    pub fn store(&self, row: usize, weights: &[f32], codes: &mut [u8], residual: Option<&mut [f32]>) -> f64 {
        for (code, lanes) in codes.iter_mut().zip(&self.codes) {
            *code = lanes[row] as u8;
        }
        let mut sums = [0.0f32; 4];
        let mut add = |column: usize, left: f32| sums[column % 4] += left * left;
        let left = weights
            .iter()
            .zip(&self.values)
            .map(|(w, values)| w - values[row]);
        match residual {
            None => left.enumerate().for_each(|(column, left)| add(column, left)),
            Some(residual) => {
                for (column, (out, left)) in residual.iter_mut().zip(left).enumerate() {
                    *out = left;
                    add(column, left);
                }
            }
        }
        sums.iter().map(|&sum| f64::from(sum)).sum()
    }
}

/// The sums over a group that a regression needs, with codes counted from the middle of the grid.
struct Sums {
    error: Lanes,
    first: Lanes,
    second: Lanes,
    cross: Lanes,
}

/// The weights of a group, the grid, and values that depend only on these.
struct Solver<'a> {
    x: &'a [Lanes],
    grid: &'a Grid,
    top: f32,
    middle: f32,
    mean: Lanes,
    /// The sum of the weights minus their rounded mean.
    rest: Lanes,
}

vectorized! {
    /// Finds the best parameters, and sets the codes and values of the tile.
    pub fn solve(tile: &mut Tile, grid: &Grid, start: Option<Parameters>) -> Parameters = solve_lanes;
}

#[inline(always)]
fn solve_lanes(tile: &mut Tile, grid: &Grid, start: Option<Parameters>) -> Parameters {
    let solver = Solver::new(&tile.x, grid);
    let (mut best, mut sums) = match start {
        Some(start) => (start, solver.evaluate(&start)),
        None => solver.search(),
    };
    let (mut current, mut least, mut open) = (best, sums.error, [true; LANES]);
    for _ in 0..grid.iterations {
        current = solver.regress(&current, &sums);
        sums = solver.evaluate(&current);
        // A row ends when its error does not decrease, so it does not depend on the other rows.
        let mut any = false;
        for l in 0..LANES {
            open[l] &= sums.error[l] < least[l];
            any |= open[l];
            least[l] = if open[l] { sums.error[l] } else { least[l] };
            best.scales[l] = if open[l] {
                current.scales[l]
            } else {
                best.scales[l]
            };
            best.offsets[l] = if open[l] {
                current.offsets[l]
            } else {
                best.offsets[l]
            };
        }
        if !any {
            break;
        }
    }
    let (codes, values) = (&mut tile.codes, &mut tile.values);
    codes.resize(tile.x.len(), ZERO);
    values.resize(tile.x.len(), ZERO);
    solver.assign(&best, codes, values);
    best
}

#[inline(always)]
fn each(mut of: impl FnMut(usize) -> f32) -> Lanes {
    let mut out = ZERO;
    for (l, out) in out.iter_mut().enumerate() {
        *out = of(l);
    }
    out
}

/// Rounds to the nearest integer, ties to even, for 0 <= x < 2^22.
#[inline(always)]
fn round(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23: sums with it are integers
    (x + SHIFT) - SHIFT
}

/// Clamps a number to a range; NaN becomes its lower end.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > low { x } else { low };
    if x < high { x } else { high }
}

/// Rounds to the nearest finite value of the stored type, ties to even.
#[inline(always)]
pub fn stored(x: f32, storage: Storage) -> f32 {
    match storage {
        Storage::F16 => {
            let x = clamp(x, -65504.0, 65504.0);
            let bits = x.to_bits();
            let normal = f32::from_bits((bits + 0x0FFF + ((bits >> 13) & 1)) & !0x1FFF);
            // Below 2^-14 float16 has steps of 2^-24, the steps of float32 between a half and one.
            let small = (x + 0.75) - 0.75;
            if x.abs() < 6.103_515_6e-5 { small } else { normal }
        }
        Storage::Bf16 => {
            let x = clamp(x, -f32::from_bits(0x7F7F_0000), f32::from_bits(0x7F7F_0000));
            let bits = x.to_bits();
            f32::from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & !0xFFFF)
        }
    }
}

impl<'a> Solver<'a> {
    #[inline(always)]
    fn new(x: &'a [Lanes], grid: &'a Grid) -> Solver<'a> {
        let (mut sum, mut rest) = (ZERO, ZERO);
        for x in x {
            sum = each(|l| sum[l] + x[l]);
        }
        let count = x.len() as f32;
        // The regression of a symmetric grid has no offset and needs no mean.
        let mean = each(|l| if grid.symmetric { 0.0 } else { sum[l] / count });
        for x in x {
            rest = each(|l| rest[l] + (x[l] - mean[l]));
        }
        let (top, middle) = (((1u32 << grid.bits) - 1) as f32, (1u32 << (grid.bits - 1)) as f32);
        Solver {
            x,
            grid,
            top,
            middle,
            mean,
            rest,
        }
    }

    /// The factor and the summand that map x to a code before rounding; a scale of zero gives a single code.
    #[inline(always)]
    fn line(&self, p: &Parameters) -> (Lanes, Lanes) {
        let single = if self.grid.symmetric { self.middle } else { 0.0 };
        let inverse = each(|l| {
            if p.scales[l] != 0.0 {
                1.0 / p.scales[l]
            } else {
                0.0
            }
        });
        let shift = each(|l| {
            if p.scales[l] != 0.0 {
                -p.offsets[l] * inverse[l]
            } else {
                single
            }
        });
        (inverse, shift)
    }

    #[inline(always)]
    fn evaluate(&self, p: &Parameters) -> Sums {
        let (inverse, shift) = self.line(p);
        let (mut error, mut first, mut second, mut cross) = (ZERO, ZERO, ZERO, ZERO);
        for x in self.x {
            for l in 0..LANES {
                let code = round(clamp(x[l] * inverse[l] + shift[l], 0.0, self.top));
                let lost = (code * p.scales[l] + p.offsets[l]) - x[l];
                let centred = code - self.middle;
                error[l] += lost * lost;
                first[l] += centred;
                second[l] += centred * centred;
                cross[l] += centred * (x[l] - self.mean[l]);
            }
        }
        Sums {
            error,
            first,
            second,
            cross,
        }
    }

    /// The best parameters for the codes of `p`, from their sums. If all codes are equal, the scale is kept.
    #[inline(always)]
    fn regress(&self, p: &Parameters, sums: &Sums) -> Parameters {
        let (count, symmetric, storage) = (self.x.len() as f32, self.grid.symmetric, self.grid.storage);
        let (mut scales, mut offsets) = (ZERO, ZERO);
        for l in 0..LANES {
            let mean = if symmetric { 0.0 } else { sums.first[l] / count };
            let spread = sums.second[l] - sums.first[l] * mean;
            let slope = sums.cross[l] - self.rest[l] * mean;
            scales[l] = stored(if spread > 0.0 { slope / spread } else { p.scales[l] }, storage);
            offsets[l] = if symmetric {
                scales[l] * -self.middle
            } else {
                stored(self.mean[l] - scales[l] * (mean + self.middle), storage)
            };
        }
        Parameters { scales, offsets }
    }

    /// The best initial grid of each row: a share of the range, shifted or, in symmetric grids, with either sign.
    #[inline(always)]
    fn search(&self) -> (Parameters, Sums) {
        let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        for x in self.x {
            for l in 0..LANES {
                low[l] = if x[l] < low[l] { x[l] } else { low[l] };
                high[l] = if x[l] > high[l] { x[l] } else { high[l] };
            }
        }
        let mut best: Option<(Parameters, Sums)> = None;
        for &share in shares(self.grid.bits) {
            if self.grid.symmetric {
                for signed in [share, -share] {
                    self.offer(self.centred(&low, &high, signed), &mut best);
                }
            } else {
                for phase in PHASES {
                    self.offer(self.shifted(&low, &high, share, phase), &mut best);
                }
            }
        }
        best.unwrap_or_else(|| {
            let none = Parameters {
                scales: ZERO,
                offsets: ZERO,
            };
            (none, self.evaluate(&none))
        })
    }

    #[inline(always)]
    fn centred(&self, low: &Lanes, high: &Lanes, share: f32) -> Parameters {
        let storage = self.grid.storage;
        let scales = each(|l| {
            let end = if -low[l] >= high[l] { -low[l] } else { -high[l] };
            stored(end / self.middle * share, storage)
        });
        Parameters {
            scales,
            offsets: each(|l| scales[l] * -self.middle),
        }
    }

    /// The grid of a share of the range. Without shift, rounding of the offset does not move its upper end.
    #[inline(always)]
    fn shifted(&self, low: &Lanes, high: &Lanes, share: f32, phase: f32) -> Parameters {
        let storage = self.grid.storage;
        let (mut scales, mut offsets) = (ZERO, ZERO);
        for l in 0..LANES {
            let margin = (high[l] - low[l]) * (0.5 - 0.5 * share);
            let step = (high[l] - low[l]) * (share / self.top);
            offsets[l] = stored(low[l] + margin + phase * step, storage);
            let whole = clamp(high[l] - margin - offsets[l], 0.0, f32::INFINITY) / self.top;
            scales[l] = stored(if phase == 0.0 { whole } else { step }, storage);
        }
        Parameters { scales, offsets }
    }

    /// Replaces the best parameters of the rows for which `parameters` has a lower error.
    #[inline(always)]
    fn offer(&self, parameters: Parameters, best: &mut Option<(Parameters, Sums)>) {
        let sums = self.evaluate(&parameters);
        let Some((old, old_sums)) = best else {
            *best = Some((parameters, sums));
            return;
        };
        let better: [bool; LANES] = std::array::from_fn(|l| sums.error[l] < old_sums.error[l]);
        let pairs = [
            (&mut old.scales, &parameters.scales),
            (&mut old.offsets, &parameters.offsets),
            (&mut old_sums.error, &sums.error),
            (&mut old_sums.first, &sums.first),
            (&mut old_sums.second, &sums.second),
            (&mut old_sums.cross, &sums.cross),
        ];
        for (old, new) in pairs {
            *old = each(|l| if better[l] { new[l] } else { old[l] });
        }
    }

    /// Computes the nearest codes, and the values that a reader dequantizes.
    #[inline(always)]
    fn assign(&self, p: &Parameters, codes: &mut [Lanes], values: &mut [Lanes]) {
        let (inverse, shift) = self.line(p);
        let symmetric = self.grid.symmetric;
        for ((x, codes), values) in self.x.iter().zip(codes).zip(values) {
            for l in 0..LANES {
                let code = round(clamp(x[l] * inverse[l] + shift[l], 0.0, self.top));
                codes[l] = code;
                values[l] = if symmetric {
                    (code - self.middle) * p.scales[l]
                } else {
                    code * p.scales[l] + p.offsets[l]
                };
            }
        }
    }
}
