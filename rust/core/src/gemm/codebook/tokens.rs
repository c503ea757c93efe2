//! Activations as kernels read them: padded to whole steps, and quantized where the mode says so.

use super::Precision;
use super::grid::Grid;
use super::planes::by_tables;
use super::planes::tables::Tables;
use crate::formats::codebook::Layout;
use crate::gemm::hadamard::rotate;
use crate::gemm::layer::Slots;
use crate::simd::Isa;
use crate::types::Activations;

/// Activations that are worth a unit of work.
const UNIT: usize = 1 << 14;
/// Bytes of a cache line.
const LINE: usize = 64;

/// At least so many columns that neighbouring tokens do not share the sets of a first-level cache of 64 lines a way, which
/// six tokens beside a piece of centroids would overflow: lines odd in number, and not about as many as a way's.
fn spread(columns: usize) -> usize {
    let lines = columns.div_ceil(LINE) | 1;
    let near = matches!(lines % 64, ..8 | 57..) && lines > 8;
    LINE * (lines + if near { 16 } else { 0 })
}

/// Some neighbouring tokens.
#[derive(Default)]
struct Part {
    /// In the exact mode tokens x stride values.
    values: Vec<f32>,
    /// In the integer modes tokens x stride codes.
    codes: Vec<u8>,
    /// In the integer modes step and zero point of each token; the step is NaN where a value is no number.
    scales: Vec<(f32, i32)>,
    /// Tables of each token, where products look activations up.
    tables: Vec<Tables>,
}

/// What activations become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    columns: usize,
    /// Columns of whole steps.
    padded: usize,
    /// Columns of a token here; those behind the last are zeros.
    stride: usize,
    /// Columns that are turned together; none if less than two.
    turned: usize,
    /// To how many bits they are rounded.
    bits: Option<u8>,
    /// They become tables, too.
    tables: bool,
    isa: Isa,
}

impl Form {
    /// What products of a tensor in a mode want.
    pub(super) fn of(layout: &Layout, precision: Precision, isa: Isa) -> Form {
        Form {
            columns: layout.shape().columns,
            padded: layout.padded_columns(),
            stride: spread(layout.padded_columns()),
            turned: layout.hadamard(),
            bits: precision.activation_bits(),
            tables: by_tables(layout.bits(), precision, isa),
            isa,
        }
    }

    /// Whether tokens become tables.
    #[cfg(target_arch = "x86_64")]
    pub fn tables(&self) -> bool {
        self.tables
    }

    /// A number that tells forms of tokens of the same length apart.
    #[cfg(target_arch = "x86_64")]
    pub fn variant(&self) -> usize {
        16 * self.turned + usize::from(self.bits.unwrap_or(0))
    }

    /// A token's codes, of an integer mode, with step and zero.
    #[cfg(target_arch = "x86_64")]
    pub fn quantized(&self, x: Activations, token: usize) -> (Vec<u8>, (f32, i32)) {
        let (mut values, mut codes) = (vec![0.0; self.columns], vec![0; self.stride]);
        read(x, token, &mut values, *self);
        let bits = self.bits.unwrap_or(8);
        let scale = quantize(self.isa, &values, bits, &mut codes[..self.columns]);
        (codes, scale)
    }
}

/// A token of a job in an integer mode.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Token<'a> {
    pub codes: &'a [u8],
    /// Step and zero.
    pub scale: (f32, i32),
}

/// The tokens of a job, to be filled part by part.
pub struct Prepared {
    form: Form,
    /// Tokens of a part, but perhaps the last.
    size: usize,
    tokens: usize,
    parts: Slots<Part>,
}

impl Prepared {
    /// Room for tokens.
    pub fn new(tokens: usize, form: Form) -> Prepared {
        let size = (UNIT / form.stride.max(1)).max(1);
        Prepared {
            form,
            size,
            tokens,
            parts: Slots::new(tokens.div_ceil(size)),
        }
    }

    /// What the activations are.
    pub fn form(&self) -> Form {
        self.form
    }

    /// How many parts there are to be filled.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Fills a part from `x`, tokens x columns.
    pub fn fill(&self, part: usize, x: Activations) {
        let tokens = part * self.size..((part + 1) * self.size).min(self.tokens);
        self.parts.fill(part, || {
            let (form, mut part) = (self.form, Part::default());
            match form.bits {
                None => {
                    part.values = vec![0.0; tokens.len() * form.stride];
                    for (token, out) in tokens.zip(part.values.chunks_exact_mut(form.stride)) {
                        read(x, token, &mut out[..form.columns], form);
                    }
                }
                Some(bits) => {
                    part.codes = vec![0; tokens.len() * form.stride];
                    let mut values = vec![0.0; form.columns];
                    for (token, codes) in tokens.zip(part.codes.chunks_exact_mut(form.stride)) {
                        read(x, token, &mut values, form);
                        let scale = quantize(form.isa, &values, bits, &mut codes[..form.columns]);
                        part.scales.push(scale);
                        if form.tables {
                            part.tables.push(Tables::new(&codes[..form.padded], bits));
                        }
                    }
                }
            }
            part
        });
    }

    #[inline(always)]
    fn part(&self, token: usize) -> (&Part, usize) {
        (self.parts.get(token / self.size), token % self.size)
    }

    /// A token's values, of a job in the exact mode.
    #[inline(always)]
    pub fn values(&self, token: usize) -> &[f32] {
        let (part, token) = self.part(token);
        &part.values[token * self.form.stride..][..self.form.stride]
    }

    /// A token's codes, of a job in an integer mode.
    #[inline(always)]
    pub fn codes(&self, token: usize) -> &[u8] {
        let (part, token) = self.part(token);
        &part.codes[token * self.form.stride..][..self.form.stride]
    }

    /// A token's codes with step and zero, of a job in an integer mode.
    #[cfg(target_arch = "x86_64")]
    pub fn token(&self, token: usize) -> Token<'_> {
        Token {
            codes: self.codes(token),
            scale: self.scale(token),
        }
    }

    /// A token's tables, of a job that looks activations up.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn tables(&self, token: usize) -> &Tables {
        let (part, token) = self.part(token);
        &part.tables[token]
    }

    /// A token's step and zero, of a job in an integer mode.
    #[inline(always)]
    pub fn scale(&self, token: usize) -> (f32, i32) {
        let (part, token) = self.part(token);
        part.scales[token]
    }
}

/// Widens a token of `out.len()` values, and turns them.
fn read(x: Activations, token: usize, out: &mut [f32], form: Form) {
    x.widen(token * out.len(), out);
    if form.turned > 1 {
        rotate(form.isa, out, form.turned);
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
