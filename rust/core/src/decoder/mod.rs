//! A decoding step: one token through all layers of a decoder in one parallel region.
//!
//! A layer is attention and experts, each behind a norm and added to what came in:
//! h = x + attention(norm x), y = h + experts(norm h), as in Llama and its descendants (Mixtral, Qwen-MoE, OLMoE).
//! Matrices are [`Projection`]s of any format; the engine of [`crate::gemm::layer`] multiplies them. What is beside the
//! matrices costs little, so that most phases of it are one unit of work and other threads wait: waking them once a
//! layer, let alone once an operation, costs more.
//!
//! Everything between the matrices is computed in f32; keys and values are rounded to what the cache holds. Sums are cut
//! where the data says, so that neither the number of threads nor the instruction set changes a bit of what is computed
//! here.

mod attention;
mod feed_forward;
mod norm;
mod past;
mod rotary;
mod router;
mod step;
#[cfg(test)]
mod tests;

use crate::gemm::layer::{Layer, Projection};
use crate::types::Activations;
use crate::{Error, Result};

pub use self::norm::Norm;
pub use self::past::{Lane, Past};
pub use self::rotary::Rotary;

/// A packed or dense tensor, as [`crate::gemm::layer`] multiplies it.
pub type Weights<'a> = Box<dyn Projection + 'a>;

/// A linear layer: W x + b.
pub struct Linear<'a> {
    /// W, rows x columns.
    pub weights: Weights<'a>,
    /// b, rows.
    pub bias: Option<Activations<'a>>,
}

/// Attention of heads that share keys and values in groups.
pub struct Attention<'a> {
    /// The norm of the input.
    pub norm: Norm<'a>,
    /// Queries: heads * width rows.
    pub query: Linear<'a>,
    /// Keys: groups * width rows, where groups divide heads.
    pub key: Linear<'a>,
    /// Values: as many rows as keys.
    pub value: Linear<'a>,
    /// Applied to the heads' outputs: heads * width columns.
    pub output: Linear<'a>,
    /// The norm of queries: of each head, or of all together, as its length says.
    pub query_norm: Option<Norm<'a>>,
    /// The norm of keys, in the same way.
    pub key_norm: Option<Norm<'a>>,
    /// Values of a head.
    pub width: usize,
    /// What products of queries and keys count.
    pub scale: f32,
}

/// Gated experts: gate and up are E x I x H, down is E x H x I.
pub struct Experts<'a> {
    /// Gate projections.
    pub gate: Weights<'a>,
    /// Up projections.
    pub up: Weights<'a>,
    /// Down projections.
    pub down: Weights<'a>,
}

/// Which experts a token goes through: those of the largest softmax.
pub struct Router<'a> {
    /// experts x H.
    pub weights: Weights<'a>,
    /// How many a token gets.
    pub top_k: usize,
    /// Their weights are made to sum to one.
    pub normalized: bool,
}

/// An expert that every token goes through.
pub struct Shared<'a> {
    /// One expert.
    pub experts: Experts<'a>,
    /// 1 x H: the sigmoid of its product is the expert's weight, which is 1 without it.
    pub gate: Option<Weights<'a>>,
}

/// The second half of a layer.
pub struct FeedForward<'a> {
    /// The norm of its input.
    pub norm: Norm<'a>,
    /// Without a router there is one expert, of weight 1.
    pub router: Option<Router<'a>>,
    /// The router's experts.
    pub experts: Experts<'a>,
    /// Beside them.
    pub shared: Option<Shared<'a>>,
}

/// A layer.
pub struct Block<'a> {
    /// The first half.
    pub attention: Attention<'a>,
    /// The second half.
    pub feed_forward: FeedForward<'a>,
}

/// A decoder, without embedding and head.
pub struct Decoder<'a> {
    /// Its layers.
    pub blocks: Vec<Block<'a>>,
    /// The positions of all layers.
    pub rotary: Rotary<'a>,
    /// The norm of the output.
    pub norm: Norm<'a>,
}

impl Experts<'_> {
    fn layer(&self) -> Layer<'_> {
        Layer {
            gate: &*self.gate,
            up: &*self.up,
            down: &*self.down,
        }
    }
}

/// That `fits`, or an error that says `what` does not.
fn require(fits: bool, what: impl FnOnce() -> String) -> Result<()> {
    match fits {
        true => Ok(()),
        false => Err(Error::InvalidArgument(what())),
    }
}

impl Decoder<'_> {
    /// Sizes fit together, and to a hidden state of `hidden` values.
    fn check(&self, hidden: usize) -> Result<()> {
        self.norm.check(hidden, "the last norm")?;
        for block in &self.blocks {
            block.attention.check(hidden)?;
            require(2 * self.rotary.frequencies.len() == block.attention.width, || {
                let (found, width) = (self.rotary.frequencies.len(), block.attention.width);
                format!("{found} frequencies for heads of width {width}")
            })?;
            block.feed_forward.check(hidden)?;
        }
        Ok(())
    }
}

impl Linear<'_> {
    fn check(&self, rows: usize, columns: usize, name: &str) -> Result<()> {
        let shape = self.weights.shape();
        let bias = self.bias.is_none_or(|bias| bias.len() == rows);
        let fits = (shape.experts, shape.rows, shape.columns) == (1, rows, columns) && bias;
        require(fits, || {
            format!("{name} is {shape:?} instead of {rows} x {columns}, or its bias has another length")
        })
    }
}
