//! Products by group-wise integer weights, straight from the packed bytes.
//!
//! With the codes q of a row, scale s_g and offset o_g of its groups (of a symmetric tensor `o_g = -2^(bits-1) s_g`),
//! `y = sum over g of s_g * (sum of q x over g) + o_g * (sum of x over g)`: two multiplications a group beside the dot
//! product of codes and activations. There are two ways to compute that ([`Mode`]):
//!
//! * *exact*: activations stay f32, codes are converted in registers (a table look-up on AVX-512).
//! * *int8*: a token's activations are quantized symmetrically to int8, with a scale for each group of columns, and
//!   dot products are of integers. `sum of x` is that of the quantized activations, so that both terms err alike and
//!   the error is that of centred weights.
//!
//! A *step* is the columns over which products add up before they are scaled: a group, or 256 columns of a whole row.
//! It is also the group of the activations' scales. 256 * 127 * 255 < 2^24: a step's integer sum is exact in f32.
//!
//! # How a product is cut
//! A block of 16 rows by all tokens of its expert is computed by one thread, tile after tile of at most 8 tokens, and
//! runs of blocks of all experts are handed out in one parallel region. The order of a sum depends on nothing but the
//! tensor, so results do not depend on the number of threads, nor on which tokens share a call. Kernels are written once
//! over [`lanes::Lanes`]; int8 gives the same bits on every instruction set, exact does not on the scalar one, which
//! does not fuse multiplications with additions.
//!
//! # Accuracy
//! With u = 2^-24, S = sum of |s q x| + |o x| and n steps: exact errs by at most (2 n + 84) u S. int8 errs by at most
//! (2 n + 4) u S against the product with quantized activations, each of which is off by at most 1/254 of the largest
//! of its step (and 2 u of itself). Where a step's largest activation is below 2^-100, the step counts as zero. A step
//! with an activation that is not finite makes its token's outputs NaN in int8 mode, and NaN or infinite in exact mode.
//!
//! Codes and parameters are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

mod activation;
mod drive;
mod kernel;
mod lanes;
mod layer;
mod output;
mod scalar;
#[cfg(test)]
mod tests;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use layer::{Layer, Routing};
use rayon::ThreadPool;

use drive::{Engine, Task};

use super::ternary::Activations;
use crate::groupwise::Blocks;
use crate::simd::Isa;
use crate::{Error, Result};

/// Most columns of a step.
pub const STEP_COLUMNS: usize = 256;

/// How activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// As f32 values.
    Exact,
    /// Quantized to int8, for each token and step.
    Int8,
}

impl Mode {
    /// Both modes.
    pub const ALL: [Mode; 2] = [Mode::Exact, Mode::Int8];

    /// The name that Python uses.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::Int8 => "int8",
        }
    }

    /// Parses [`Mode::name`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: there is no such mode.
    pub fn from_name(name: &str) -> Result<Mode> {
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| Error::InvalidArgument(format!("the mode is exact or int8, not {name:?}")))
    }
}

/// What computes a product of a mode on this processor with an instruction set that it runs.
pub fn kernel_name(mode: Mode, isa: Isa) -> &'static str {
    match (mode, isa) {
        #[cfg(target_arch = "x86_64")]
        (Mode::Int8, Isa::Avx2) if x86::has_avx_vnni() => "avx-vnni",
        (Mode::Int8, Isa::Avx512) => "avx512-vnni",
        _ => isa.name(),
    }
}

/// y = W x with each expert's own tokens, in one parallel region.
///
/// `x` is N x C sorted by expert; `offsets` has E + 1 entries that ascend from 0 to N; `y` is N x R.
///
/// # Errors
/// [`Error::InvalidArgument`]: sizes do not match, or the processor lacks the instruction set.
pub fn matmul_grouped<'a>(
    view: &dyn Blocks,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, isa) = (x.into(), isa.require()?);
    let shape = view.layout().shape();
    let ascending = offsets.first() == Some(&0) && offsets.is_sorted();
    if offsets.len() != shape.experts + 1 || !ascending {
        return invalid(format!(
            "{} offsets for {} experts: they must ascend from 0",
            offsets.len(),
            shape.experts
        ));
    }
    check(view, x, offsets[shape.experts], y)?;
    let tasks = offsets
        .windows(2)
        .enumerate()
        .filter(|(_, pair)| pair[0] < pair[1]);
    let tasks = tasks.map(|(expert, pair)| Task {
        expert,
        places: pair[0]..pair[1],
    });
    let tasks: Vec<Task> = tasks.collect();
    run(
        view,
        &tasks,
        offsets[shape.experts],
        x,
        y,
        Engine { mode, isa, pool },
    );
    Ok(())
}

/// y = W x for all tokens of one expert: `x` is T x C, `y` is T x R.
///
/// # Errors
/// [`Error::InvalidArgument`]: sizes do not match, there is no such expert, or the processor lacks the set.
#[allow(clippy::too_many_arguments)] // what a product is made of
pub fn matmul<'a>(
    view: &dyn Blocks,
    expert: usize,
    x: impl Into<Activations<'a>>,
    tokens: usize,
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, isa) = (x.into(), isa.require()?);
    let experts = view.layout().shape().experts;
    if expert >= experts {
        return invalid(format!("there is no expert {expert} of {experts}"));
    }
    check(view, x, tokens, y)?;
    let task = Task {
        expert,
        places: 0..tokens,
    };
    run(view, &[task], tokens, x, y, Engine { mode, isa, pool });
    Ok(())
}

fn run(view: &dyn Blocks, tasks: &[Task], tokens: usize, x: Activations, y: &mut [f32], engine: Engine) {
    if x.len() == 0 {
        return y.fill(0.0);
    }
    let list: Vec<usize> = (0..tokens).collect();
    let prepared = engine.prepare(view, tasks, x, &list);
    engine.products(view, tasks, &prepared, y);
}

fn check(view: &dyn Blocks, x: Activations, tokens: usize, y: &[f32]) -> Result<()> {
    let shape = view.layout().shape();
    if tokens.checked_mul(shape.columns) == Some(x.len()) && tokens.checked_mul(shape.rows) == Some(y.len()) {
        return Ok(());
    }
    let (inputs, outputs) = (x.len(), y.len());
    invalid(format!(
        "{inputs} activations and {outputs} outputs for {tokens} tokens of {shape:?}"
    ))
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
