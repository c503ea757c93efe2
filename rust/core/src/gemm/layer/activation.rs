//! The gates of experts, which combine the products of gate and up, with an exponential that compilers vectorize.

use crate::simd::{Isa, vectorized};

/// The function of the products `gate` and `up` that gives the input of an expert's down projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// silu(gate) * up, where silu(x) = x / (1 + exp(-x)).
    Silu,
    /// g / (1 + exp(-alpha * g)) * (u + 1), where g is at most `limit` and u between -limit and limit (gpt-oss).
    Clamped {
        /// The steepness of the gate.
        alpha: f32,
        /// The limit at which products are clamped.
        limit: f32,
    },
}

impl Gate {
    /// Replaces `gate` by the input of the down projection, with the same bits on every set.
    pub fn apply(self, isa: Isa, gate: &mut [f32], up: &[f32]) {
        match self {
            Gate::Silu => gated(isa, gate, up),
            Gate::Clamped { alpha, limit } => clamped(isa, gate, up, alpha, limit),
        }
    }
}

vectorized! {
    fn clamped(gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) = clamped_loop;
}

#[inline(always)]
fn clamped_loop(gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        // Comparisons instead of `clamp`, because NaN must pass.
        let g = if *gate > limit { limit } else { *gate };
        let u = if up > limit { limit } else { up };
        let u = if u < -limit { -limit } else { u };
        *gate = g * sigmoid(alpha * g) * (u + 1.0);
    }
}

/// 1 / (1 + exp(-x)), with the same bits on every instruction set.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

vectorized! {
    /// Replaces `gate` by `silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`, with the same bits on every set.
    pub fn gated(gate: &mut [f32], up: &[f32]) = gated_loop, in 256 bits;
}

#[inline(always)]
fn gated_loop(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Adding this constant rounds to an integer, which is then in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// e^x, within 2 units in the last place if the result is a normal number. Results are flushed to about 2^-126 below
/// and to 2^127 or infinity above; NaN stays NaN. Operations are not fused, so every instruction set gives the same
/// bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Comparisons instead of `clamp`, because NaN must pass.
    let x = if x > 88.3 { 88.3 } else { x };
    let x = if x < -87.3 { -87.3 } else { x };
    let shifted = x * LOG2_E + ROUNDER;
    let exponent = shifted - ROUNDER;
    let r = x - exponent * LN_2[0] - exponent * LN_2[1];
    // The Taylor series on |r| <= 0.35: the first omitted term is below 2^-26 of the result.
    let mut sum = 1.0 / 5040.0;
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + term;
    }
    let power = (shifted.to_bits() as i32)
        .wrapping_sub(ROUNDER.to_bits() as i32)
        .wrapping_add(127);
    sum * f32::from_bits((power as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_good_to_two_units() {
        let mut x = -87.0f32;
        while x < 88.0 {
            let (found, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (found - expected).abs() <= expected * 2f64.powi(-22),
                "{x}: {found} for {expected}"
            );
            x += 0.001_37;
        }
        assert!(exp(f32::NAN).is_nan() && exp(-1e9) < 1.3e-38 && exp(1e9) > 1e38);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn gates_at_their_limits() {
        let mut gate = [0.0, 200.0, -200.0, f32::NAN, 1.0];
        gated(Isa::SCALAR, &mut gate, &[3.0, 2.0, 1.0, 1.0, 2.0]);
        assert_eq!(gate[..2], [0.0, 400.0]);
        assert!(gate[2].abs() < 1e-30 && gate[3].is_nan());
        assert!((gate[4] - 2.0 * 0.731_058_6).abs() < 1e-6);
    }

    #[test]
    fn clamped_gates_are_their_formula() {
        let (alpha, limit) = (1.702, 7.0);
        let gates: Vec<f32> = (-40..40).map(|i| i as f32 * 0.37).collect();
        let ups: Vec<f32> = gates.iter().rev().map(|x| 0.9 * x).collect();
        for isa in Isa::all_available() {
            let mut found = gates.clone();
            Gate::Clamped { alpha, limit }.apply(isa, &mut found, &ups);
            for ((&gate, &up), found) in gates.iter().zip(&ups).zip(found) {
                let g = f64::from(gate).min(7.0);
                let u = f64::from(up).clamp(-7.0, 7.0);
                let expected = g / (1.0 + (-f64::from(alpha) * g).exp()) * (u + 1.0);
                // Rounding alpha * g alone accounts for up to 5e-7 of the result.
                assert!((f64::from(found) - expected).abs() <= 2e-6 * expected.abs().max(1e-3));
            }
        }
    }
}
