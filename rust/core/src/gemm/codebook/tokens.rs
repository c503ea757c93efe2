//! Activations as kernels read them: padded to whole steps, and quantized where the mode says so.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::Mode;
use crate::codebook::Layout;
use crate::gemm::hadamard::rotate;
use crate::gemm::ternary::Activations;
use crate::simd::Isa;

/// Fewer values than this are not worth waking threads for.
const PARALLEL: usize = 1 << 16;

/// The tokens of a call.
pub(super) struct Tokens {
    /// Columns of a token here; those behind the last are zeros.
    pub stride: usize,
    /// In the exact mode N x stride values.
    pub values: Vec<f32>,
    /// In the integer modes N x stride codes.
    pub codes: Vec<u8>,
    /// In the integer modes step and zero point of each token; the step is NaN where a value is no number.
    pub scales: Vec<(f32, i32)>,
}

impl Tokens {
    /// Reads, and quantizes, `x` of `count` tokens.
    pub fn new(
        layout: &Layout,
        x: Activations,
        count: usize,
        mode: Mode,
        isa: Isa,
        pool: &ThreadPool,
    ) -> Tokens {
        let (columns, stride) = (layout.shape().columns, layout.padded_columns());
        let turn = (isa, layout.hadamard());
        let mut tokens = Tokens {
            stride,
            values: vec![],
            codes: vec![],
            scales: vec![],
        };
        let pool = Some(pool).filter(|p| count * columns >= PARALLEL && p.current_num_threads() > 1);
        match mode.activation_bits() {
            _ if stride == 0 => tokens.scales = vec![(0.0, 0); count],
            None => tokens.fill(x, columns, count, turn, pool),
            Some(bits) => tokens.fill_rounded(x, columns, count, bits, turn, pool),
        }
        tokens
    }

    fn fill(
        &mut self,
        x: Activations,
        columns: usize,
        count: usize,
        turn: (Isa, usize),
        pool: Option<&ThreadPool>,
    ) {
        self.values = vec![0.0; count * self.stride];
        let fill = |(token, out): (usize, &mut [f32])| read(x, token, &mut out[..columns], turn);
        let values = &mut self.values;
        match pool {
            Some(pool) => pool.install(|| {
                let rows = values.par_chunks_exact_mut(self.stride);
                rows.enumerate().for_each(fill);
            }),
            None => values.chunks_exact_mut(self.stride).enumerate().for_each(fill),
        }
    }

    fn fill_rounded(
        &mut self,
        x: Activations,
        columns: usize,
        count: usize,
        bits: u8,
        turn: (Isa, usize),
        pool: Option<&ThreadPool>,
    ) {
        self.codes = vec![0; count * self.stride];
        self.scales = vec![(0.0, 0); count];
        let fill = |values: &mut Vec<f32>, token: usize, codes: &mut [u8], scale: &mut (f32, i32)| {
            values.resize(columns, 0.0);
            read(x, token, values, turn);
            *scale = quantize(turn.0, values, bits, &mut codes[..columns]);
        };
        let (codes, scales) = (&mut self.codes, &mut self.scales);
        if let Some(pool) = pool {
            let rows = codes.par_chunks_exact_mut(self.stride);
            let work = rows.zip(scales.par_iter_mut()).enumerate();
            pool.install(|| work.for_each_init(Vec::new, |v, (token, (c, s))| fill(v, token, c, s)));
        } else {
            let mut values = Vec::new();
            let work = codes.chunks_exact_mut(self.stride).zip(scales).enumerate();
            work.for_each(|(token, (c, s))| fill(&mut values, token, c, s));
        }
    }
}

/// Widens a token of `out.len()` values, and turns blocks of `width` of them.
fn read(x: Activations, token: usize, out: &mut [f32], (isa, width): (Isa, usize)) {
    let at = token * out.len()..(token + 1) * out.len();
    match x {
        Activations::F32(x) => out.copy_from_slice(&x[at]),
        Activations::Bf16(x) => {
            let pairs = out.iter_mut().zip(&x[at]);
            pairs.for_each(|(out, &x)| *out = half::bf16::from_bits(x).to_f32());
        }
    }
    if width > 1 {
        rotate(isa, out, width);
    }
}

/// Quantizes a token: `x ~ step * (code - zero)`; returns step and zero. `isa` must have been found available.
fn quantize(isa: Isa, x: &[f32], bits: u8, codes: &mut [u8]) -> (f32, i32) {
    match isa {
        // SAFETY: `isa.require()` proved that the processor runs every feature of the set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { quantize_avx2(x, bits, codes) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { super::x86::quantize(x, bits, codes) },
        _ => quantize_portable(x, bits, codes),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn quantize_avx2(x: &[f32], bits: u8, codes: &mut [u8]) -> (f32, i32) {
    quantize_portable(x, bits, codes)
}

#[inline(always)]
fn quantize_portable(x: &[f32], bits: u8, codes: &mut [u8]) -> (f32, i32) {
    const LANES: usize = 16;
    let (mut low, mut high, mut odd) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    let mut take = |i: usize, value: f32| {
        low[i] = if value < low[i] { value } else { low[i] };
        high[i] = if value > high[i] { value } else { high[i] };
        // Zero unless the value is NaN or infinite.
        odd[i] += value * 0.0;
    };
    let chunks = x.chunks_exact(LANES);
    chunks
        .remainder()
        .iter()
        .enumerate()
        .for_each(|(i, &value)| take(i, value));
    chunks.for_each(|chunk| (0..LANES).for_each(|i| take(i, chunk[i])));
    let fold = |lanes: [f32; LANES], pick: fn(f32, f32) -> f32| lanes.into_iter().fold(0f32, pick);
    let range = (fold(low, f32::min), fold(high, f32::max));
    let Some(grid) = Grid::of(range, odd.iter().all(|&o| o == 0.0), bits) else {
        return (f32::NAN, 0);
    };
    for (code, &value) in codes.iter_mut().zip(x) {
        // Not negative, so that truncation rounds to nearest.
        *code = (value * grid.inverse + grid.shift).clamp(0.0, grid.top) as i32 as u8;
    }
    (grid.step, grid.zero)
}

/// How a token is quantized: a value's code is `value * inverse + shift`, clamped to 0 and `top`, truncated.
pub(super) struct Grid {
    pub step: f32,
    pub zero: i32,
    pub inverse: f32,
    pub shift: f32,
    pub top: f32,
}

impl Grid {
    /// The grid of values between `low <= 0` and `high >= 0`; `None` if they are not finite.
    ///
    /// A range so small that its step has no finite inverse becomes zeros.
    pub fn of((low, high): (f32, f32), finite: bool, bits: u8) -> Option<Grid> {
        let top = f32::from((1u16 << bits) - 1);
        let step = (high - low) / top;
        let inverse = 1.0 / step;
        if !finite || !step.is_finite() {
            return None;
        }
        if !inverse.is_finite() {
            let (step, zero, inverse, shift) = (0.0, 0, 0.0, 0.0);
            return Some(Grid {
                step,
                zero,
                inverse,
                shift,
                top,
            });
        }
        let zero = (-low * inverse + 0.5).floor().clamp(0.0, top);
        let shift = zero + 0.5;
        Some(Grid {
            step,
            zero: zero as i32,
            inverse,
            shift,
            top,
        })
    }
}
