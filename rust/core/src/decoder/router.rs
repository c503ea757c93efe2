//! The selection and the weights of a token's experts.
//!
//! An expert's score is the softmax or the sigmoid of its logit. The experts with the largest scores are selected; if
//! experts are in groups, only from the best groups (DeepSeek-V2, arXiv 2405.04434, section 2.1.3; V3, arXiv
//! 2412.19437, 2.1.2).

use super::{Weights, add, require};
use crate::Result;
use crate::gemm::layer::sigmoid;
use crate::types::Activations;

/// A router.
pub struct Router<'a> {
    /// experts x H: its products are the logits.
    pub weights: Weights<'a>,
    /// Added to the logits, experts.
    pub bias: Option<Activations<'a>>,
    /// Whether scores are sigmoids of the logits instead of their softmax.
    pub sigmoid: bool,
    /// Added to the scores for selection, but not to the weights; experts.
    pub correction: Option<Activations<'a>>,
    /// Groups of experts, if any.
    pub groups: Option<Groups>,
    /// The number of experts per token.
    pub top_k: usize,
    /// Whether the weights are normalized to sum to one.
    pub normalized: bool,
    /// The factor of the weights, applied last.
    pub scale: f32,
}

/// Consecutive groups of equally many experts.
#[derive(Debug, Clone, Copy)]
pub struct Groups {
    /// The number of groups.
    pub count: usize,
    /// The number of groups to select from: those with the largest sums.
    pub kept: usize,
    /// The number of largest scores in a group's sum.
    pub summed: usize,
}

/// A token's experts and their weights.
pub(super) struct Choice {
    pub experts: Vec<i64>,
    pub weights: Vec<f32>,
}

impl Router<'_> {
    /// Selects the experts of a token from the products of the weights with it; of equal scores, the first.
    pub(super) fn choose(&self, products: &[f32]) -> Choice {
        let mut logits = products.to_vec();
        if let Some(bias) = self.bias {
            add(bias, &mut logits);
        }
        let scores = self.scores(&logits);
        let mut ranks = scores.clone();
        if let Some(correction) = self.correction {
            add(correction, &mut ranks);
        }
        if let Some(groups) = self.groups {
            groups.hide(&mut ranks);
        }
        let order = &largest(&ranks)[..self.top_k];
        let mut weights: Vec<f32> = order.iter().map(|&expert| scores[expert]).collect();
        let sum = if self.normalized {
            weights.iter().sum()
        } else {
            1.0
        };
        weights
            .iter_mut()
            .for_each(|weight| *weight = *weight / sum * self.scale);
        Choice {
            experts: order.iter().map(|&expert| expert as i64).collect(),
            weights,
        }
    }

    fn scores(&self, logits: &[f32]) -> Vec<f32> {
        if self.sigmoid {
            return logits.iter().map(|&logit| sigmoid(logit)).collect();
        }
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f32> = logits.iter().map(|logit| (logit - top).exp()).collect();
        let total: f32 = powers.iter().sum();
        powers.iter().map(|power| power / total).collect()
    }

    pub(super) fn check(&self, hidden: usize) -> Result<()> {
        let shape = self.weights.shape();
        let experts = shape.rows;
        let each = |vector: Option<Activations>| vector.is_none_or(|vector| vector.len() == experts);
        let within = self.groups.map_or(experts, |groups| groups.experts(experts));
        let fits = shape.experts == 1 && shape.columns == hidden && (1..=within).contains(&self.top_k);
        require(fits && each(self.bias) && each(self.correction), || {
            format!(
                "a router of shape {shape:?} for {} of {within} experts",
                self.top_k
            )
        })
    }
}

impl Groups {
    /// The number of experts that a token can select from; 0 if the groups do not match.
    fn experts(&self, experts: usize) -> usize {
        let fits = self.count > 0 && experts.is_multiple_of(self.count) && self.kept <= self.count;
        let size = experts / self.count.max(1);
        if fits && (1..=size).contains(&self.summed) {
            self.kept * size
        } else {
            0
        }
    }

    /// Ranks the experts of unselected groups last.
    fn hide(&self, ranks: &mut [f32]) {
        let size = ranks.len() / self.count;
        let sum = |group: &[f32]| {
            largest(group)[..self.summed]
                .iter()
                .map(|&expert| group[expert])
                .sum()
        };
        let sums: Vec<f32> = ranks.chunks_exact(size).map(sum).collect();
        for &group in &largest(&sums)[self.kept..] {
            ranks[group * size..][..size].fill(f32::NEG_INFINITY);
        }
    }
}

/// The indices of values in descending order; of equal values, the first comes first.
fn largest(values: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::dense::{Dense, Kind, View};
    use crate::simd::Isa;
    use crate::types::Mode;

    /// A router of `N` experts with arbitrary weights.
    fn router<const N: usize>(top_k: usize, normalized: bool) -> Router<'static> {
        let view = View::new(vec![0; 4 * N].leak(), Kind::F32, N, 1).unwrap();
        Router {
            weights: Box::new(Dense::new(view, Mode::Auto, Isa::SCALAR).unwrap()),
            bias: None,
            sigmoid: false,
            correction: None,
            groups: None,
            top_k,
            normalized,
            scale: 1.0,
        }
    }

    fn assert_chosen(router: &Router, logits: &[f32], experts: &[i64], weights: &[f32]) {
        router.check(1).unwrap();
        let found = router.choose(logits);
        let near = found
            .weights
            .iter()
            .zip(weights)
            .all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(
            found.experts == experts && near,
            "{:?} {:?}",
            found.experts,
            found.weights
        );
    }

    #[test]
    fn the_largest_are_chosen() {
        let logits = [0.0, 2.0f32.ln(), 3.0f32.ln(), 2.0f32.ln()];
        assert_chosen(&router::<4>(2, false), &logits, &[2, 1], &[0.375, 0.25]);
        let thirds = [3.0 / 7.0, 2.0 / 7.0, 2.0 / 7.0];
        assert_chosen(&router::<4>(3, true), &logits, &[2, 1, 3], &thirds);
        let biased = Router {
            bias: Some(Activations::F32(&[9.0, 0.0, 0.0, 0.0])),
            ..router::<4>(1, true)
        };
        assert_chosen(&biased, &logits, &[0], &[1.0]);
    }

    #[test]
    fn corrections_affect_the_selection_but_not_the_weights() {
        let odds = |odds: f32| (odds / (1.0 - odds)).ln();
        let logits = [0.9, 0.8, 0.5, 0.4].map(odds);
        let corrected = Router {
            sigmoid: true,
            correction: Some(Activations::F32(&[-1.0, 0.0, 0.0, 1.0])),
            scale: 2.5,
            ..router::<4>(2, true)
        };
        assert_chosen(&corrected, &logits, &[3, 1], &[2.5 / 3.0, 5.0 / 3.0]);
    }

    #[test]
    fn the_best_groups_are_kept() {
        let logits = [5.0, 0.0, 4.0, 3.9, 1.0, 1.0].map(|n: f32| n.ln().max(-50.0));
        let grouped = |summed, kept| Router {
            groups: Some(Groups {
                count: 3,
                kept,
                summed,
            }),
            ..router::<6>(2, false)
        };
        let share = |n: f32| n / 14.9;
        assert_chosen(&grouped(1, 1), &logits, &[0, 1], &[share(5.0), 0.0]);
        assert_chosen(&grouped(2, 1), &logits, &[2, 3], &[share(4.0), share(3.9)]);
        assert_chosen(&grouped(2, 2), &logits, &[0, 2], &[share(5.0), share(4.0)]);
        assert!(
            grouped(3, 1).check(1).is_err()
                && grouped(1, 4).check(1).is_err()
                && grouped(1, 0).check(1).is_err()
        );
    }

    #[test]
    fn nan_scores_still_select_experts() {
        let Choice { experts, weights } = router::<3>(2, true).choose(&[1.0, f32::NAN, 2.0]);
        assert_eq!(experts.len(), 2);
        assert!(experts.iter().all(|&expert| (0..3).contains(&expert)) && weights[0].is_nan());
    }
}
