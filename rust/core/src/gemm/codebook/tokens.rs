//! Prepared activations: padded to whole steps, and quantized in the integer modes.

use super::Precision;
use super::grid::Grid;
use super::planes::by_tables;
use super::planes::tables::Tables;
use crate::formats::codebook::Layout;
use crate::gemm::layer::Slots;
use crate::hadamard::rotate;
use crate::simd::{Isa, Kind};
use crate::types::Activations;

/// The activations of a unit of work.
const UNIT: usize = 1 << 14;
/// The bytes of a cache line.
const LINE: usize = 64;

/// The stride between tokens, at least `columns`. It is an odd number of lines, not near a multiple of 64, so that
/// tokens do not share sets of a first-level cache of 64 sets, which six tokens and a piece of centroids would
/// overflow.
fn stride(columns: usize) -> usize {
    let lines = columns.div_ceil(LINE) | 1;
    let near = matches!(lines % 64, ..8 | 57..) && lines > 8;
    LINE * (lines + if near { 16 } else { 0 })
}

/// The consecutive tokens of one unit of work.
#[derive(Default)]
struct Unit {
    /// The values in the exact mode, tokens x stride.
    values: Vec<f32>,
    /// The codes in the integer modes, tokens x stride.
    codes: Vec<u8>,
    /// The step and zero point of each token in the integer modes; the step is NaN if an activation is not finite.
    scales: Vec<(f32, i32)>,
    /// The tables of each token, for products that look up activations.
    tables: Vec<Tables>,
}

/// The form of prepared activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    columns: usize,
    /// The columns, padded to whole steps.
    padded: usize,
    /// The distance between consecutive tokens; columns after the last are zeros.
    stride: usize,
    /// The width of the Hadamard rotation; no rotation if less than two.
    hadamard: usize,
    /// The bits of rounded activations; `None` in the exact mode.
    bits: Option<u8>,
    /// Whether tokens have tables.
    tables: bool,
    isa: Isa,
}

impl Form {
    /// The form that the kernels of a tensor read in a precision.
    pub(super) fn of(layout: &Layout, precision: Precision, isa: Isa) -> Form {
        Form {
            columns: layout.shape().columns,
            padded: layout.padded_columns(),
            stride: stride(layout.padded_columns()),
            hadamard: layout.hadamard(),
            bits: precision.activation_bits(),
            tables: by_tables(layout.bits(), precision, isa),
            isa,
        }
    }

    /// The instruction set of the kernels.
    #[cfg(target_arch = "x86_64")]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether tokens have tables.
    #[cfg(target_arch = "x86_64")]
    pub fn tables(&self) -> bool {
        self.tables
    }

    /// A number that is unique for each form with the same number of columns.
    #[cfg(target_arch = "x86_64")]
    pub fn variant(&self) -> usize {
        16 * self.hadamard + usize::from(self.bits.unwrap_or(0))
    }

    /// A token's codes in an integer mode, and their step and zero.
    #[cfg(target_arch = "x86_64")]
    pub fn quantized(&self, x: Activations, token: usize) -> (Vec<u8>, (f32, i32)) {
        let (mut values, mut codes) = (vec![0.0; self.columns], vec![0; self.stride]);
        read(x, token, &mut values, *self);
        let bits = self.bits.unwrap_or(8);
        let scale = quantize(self.isa, &values, bits, &mut codes[..self.columns]);
        (codes, scale)
    }
}

/// A prepared token in an integer mode.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[derive(Clone, Copy)]
pub struct Token<'a> {
    pub codes: &'a [u8],
    /// The step and the zero point.
    pub scale: (f32, i32),
}

/// The prepared activations of a job, filled unit by unit.
pub struct Prepared {
    form: Form,
    /// The number of tokens of a unit; the last unit may have fewer.
    size: usize,
    tokens: usize,
    units: Slots<Unit>,
}

impl Prepared {
    /// Empty slots for a number of tokens.
    pub fn new(tokens: usize, form: Form) -> Prepared {
        let size = (UNIT / form.stride.max(1)).max(1);
        Prepared {
            form,
            size,
            tokens,
            units: Slots::new(tokens.div_ceil(size)),
        }
    }

    /// The form of the activations.
    pub fn form(&self) -> Form {
        self.form
    }

    /// The number of units of work.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// Fills a unit from `x`, tokens x columns.
    pub fn fill(&self, unit: usize, x: Activations) {
        let tokens = unit * self.size..((unit + 1) * self.size).min(self.tokens);
        self.units.fill(unit, || {
            let (form, mut unit) = (self.form, Unit::default());
            match form.bits {
                None => {
                    unit.values = vec![0.0; tokens.len() * form.stride];
                    for (token, out) in tokens.zip(unit.values.chunks_exact_mut(form.stride)) {
                        read(x, token, &mut out[..form.columns], form);
                    }
                }
                Some(bits) => {
                    unit.codes = vec![0; tokens.len() * form.stride];
                    let mut values = vec![0.0; form.columns];
                    for (token, codes) in tokens.zip(unit.codes.chunks_exact_mut(form.stride)) {
                        read(x, token, &mut values, form);
                        let scale = quantize(form.isa, &values, bits, &mut codes[..form.columns]);
                        unit.scales.push(scale);
                        if form.tables {
                            unit.tables
                                .push(Tables::new(form.isa, &codes[..form.padded], bits));
                        }
                    }
                }
            }
            unit
        });
    }

    #[inline(always)]
    fn unit(&self, token: usize) -> (&Unit, usize) {
        (self.units.get(token / self.size), token % self.size)
    }

    /// A token's values in the exact mode.
    #[inline(always)]
    pub fn values(&self, token: usize) -> &[f32] {
        let (unit, token) = self.unit(token);
        &unit.values[token * self.form.stride..][..self.form.stride]
    }

    /// A token's codes in an integer mode.
    #[inline(always)]
    pub fn codes(&self, token: usize) -> &[u8] {
        let (unit, token) = self.unit(token);
        &unit.codes[token * self.form.stride..][..self.form.stride]
    }

    /// A token's codes, step and zero in an integer mode.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub fn token(&self, token: usize) -> Token<'_> {
        Token {
            codes: self.codes(token),
            scale: self.scale(token),
        }
    }

    /// A token's tables, if [`Form::tables`] is true.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn tables(&self, token: usize) -> &Tables {
        let (unit, token) = self.unit(token);
        &unit.tables[token]
    }

    /// A token's step and zero in an integer mode.
    #[inline(always)]
    pub fn scale(&self, token: usize) -> (f32, i32) {
        let (unit, token) = self.unit(token);
        unit.scales[token]
    }
}

/// Converts a token of `out.len()` activations to f32, and rotates them.
fn read(x: Activations, token: usize, out: &mut [f32], form: Form) {
    x.widen(token * out.len(), out);
    if form.hadamard > 1 {
        rotate(form.isa, out, form.hadamard);
    }
}

/// Quantizes a token: `x ~ step * (code - zero)`; returns step and zero. On Arm, codes of 8 bits are signed bytes.
fn quantize(isa: Isa, x: &[f32], bits: u8, codes: &mut [u8]) -> (f32, i32) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2 and FMA.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { quantize_avx2(x, bits, codes) },
        // SAFETY: `isa` proves that the processor has AVX-512.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => unsafe { super::x86::quantize(x, bits, codes) },
        Kind::Neon if bits == 8 => {
            let (step, zero) = quantize_portable(x, bits, codes);
            codes.iter_mut().for_each(|code| *code ^= 0x80);
            (step, zero - 0x80)
        }
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
        // The value is not negative, so truncation, with the half in `shift`, rounds to nearest.
        *code = (value * grid.inverse + grid.shift).clamp(0.0, grid.top) as i32 as u8;
    }
    (grid.step, grid.zero)
}
