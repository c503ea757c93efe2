//! A decoding step: one token through all layers of a decoder in one parallel region.
//!
//! A layer consists of a token mixer and experts, each after a norm and with a residual connection, as in Llama and
//! its descendants: `h = x + mixer(norm x)`, `y = h + experts(norm h)`. A mixer is multi-head attention
//! ([`Attention`]: Mixtral, Qwen-MoE, OLMoE, GLM-4, gpt-oss), latent attention ([`Latent`]: DeepSeek) or the gated
//! delta rule ([`Delta`]: most layers of Qwen3-Next). Norms, biases, gates, windows and routers are optional data.
//!
//! Matrices are [`Projection`]s of any format, multiplied by the engine of [`crate::gemm::layer`]. Operations besides
//! the matrices are cheap, so most of their phases are one unit of work while other threads wait: waking threads once
//! per layer, or even once per operation, would cost more.
//!
//! Everything between the matrices is computed in f32; keys and values are rounded to the type of the cache. Sums are
//! divided at points determined by the data, so neither the number of threads nor the instruction set changes a bit
//! of these results.

mod attention;
mod delta;
mod feed_forward;
mod latent;
mod norm;
mod output;
mod past;
mod rotary;
mod router;
mod softmax;
mod step;
mod sums;
#[cfg(test)]
mod tests;

use crate::gemm::layer::{Biases, Gate, Layer, Projection};
use crate::types::Activations;
use crate::{Error, Result};

pub use self::attention::Attention;
pub use self::delta::Delta;
pub use self::latent::Latent;
pub use self::norm::Norm;
pub use self::past::{Lane, Past};
pub use self::rotary::{Order, Rotary};
pub use self::router::{Groups, Router};

/// A packed or dense tensor for the engine of [`crate::gemm::layer`].
pub type Weights<'a> = Box<dyn Projection + 'a>;

/// A linear layer: W x + b.
pub struct Linear<'a> {
    /// W, rows x columns.
    pub weights: Weights<'a>,
    /// b, rows.
    pub bias: Option<Activations<'a>>,
}

/// The token mixer of a layer.
pub enum Mixer<'a> {
    /// Multi-head attention.
    Attention(Attention<'a>),
    /// Latent attention.
    Latent(Latent<'a>),
    /// The gated delta rule.
    Delta(Delta<'a>),
}

/// Gated experts: gate and up are E x I x H, down is E x H x I.
pub struct Experts<'a> {
    /// Gate projections.
    pub gate: Weights<'a>,
    /// Up projections.
    pub up: Weights<'a>,
    /// Down projections.
    pub down: Weights<'a>,
    /// The gate, which combines the products of gate and up.
    pub act: Gate,
    /// The biases of the products.
    pub biases: Option<Biases<'a>>,
}

/// An expert that every token uses.
pub struct Shared<'a> {
    /// The single expert.
    pub experts: Experts<'a>,
    /// 1 x H: the sigmoid of its product is the expert's weight; the weight is 1 without it.
    pub gate: Option<Weights<'a>>,
}

/// The second half of a layer.
pub struct FeedForward<'a> {
    /// The norm of its input.
    pub norm: Norm<'a>,
    /// The router; without it there is one expert, of weight 1.
    pub router: Option<Router<'a>>,
    /// The routed experts.
    pub experts: Experts<'a>,
    /// The shared expert.
    pub shared: Option<Shared<'a>>,
}

/// A layer.
pub struct Block<'a> {
    /// The norm of its input.
    pub norm: Norm<'a>,
    /// The token mixer.
    pub mixer: Mixer<'a>,
    /// The experts.
    pub feed_forward: FeedForward<'a>,
}

/// A decoder, without embedding and head.
pub struct Decoder<'a> {
    /// Its layers.
    pub blocks: Vec<Block<'a>>,
    /// The rotary positions of all layers.
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
            act: self.act,
            biases: self.biases,
        }
    }
}

/// Returns an error with the message `what` unless `fits`.
fn require(fits: bool, what: impl FnOnce() -> String) -> Result<()> {
    match fits {
        true => Ok(()),
        false => Err(Error::InvalidArgument(what())),
    }
}

impl Decoder<'_> {
    /// Checks that sizes match each other and a hidden state of `hidden` values.
    fn check(&self, hidden: usize) -> Result<()> {
        self.norm.check(hidden, "the last norm")?;
        let rotated = 2 * self.rotary.frequencies.len();
        for block in &self.blocks {
            block.norm.check(hidden, "the first norm of a layer")?;
            match &block.mixer {
                Mixer::Attention(attention) => attention.check(hidden, rotated)?,
                Mixer::Latent(latent) => latent.check(hidden, rotated)?,
                Mixer::Delta(delta) => delta.check(hidden)?,
            }
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

    fn add_bias(&self, sums: &mut [f32]) {
        if let Some(bias) = self.bias {
            add(bias, sums);
        }
    }
}

/// Adds a vector to `sums`.
fn add(vector: Activations, sums: &mut [f32]) {
    let mut values = vec![0.0; sums.len()];
    vector.widen(0, &mut values);
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
