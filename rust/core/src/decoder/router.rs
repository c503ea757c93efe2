//! Which experts a token goes through, and how much each counts.

/// A token's experts and their weights.
pub(super) struct Choice {
    pub experts: Vec<i64>,
    pub weights: Vec<f32>,
}

/// The `top_k` largest of the softmax of `logits`, made to sum to one if `normalized`; of equals the first.
pub(super) fn choose(logits: &[f32], top_k: usize, normalized: bool) -> Choice {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|logit| (logit - top).exp()).collect();
    let total: f32 = powers.iter().sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| powers[b].total_cmp(&powers[a]));
    order.truncate(top_k);
    let mut weights: Vec<f32> = order.iter().map(|&expert| powers[expert] / total).collect();
    if normalized {
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
    Choice {
        experts: order.iter().map(|&expert| expert as i64).collect(),
        weights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen() {
        let logits = [0.0, 2.0f32.ln(), 3.0f32.ln(), 2.0f32.ln()];
        let near = |found: &[f32], expected: &[f32]| {
            found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
        };
        let Choice { experts, weights } = choose(&logits, 2, false);
        assert!(
            experts == [2, 1] && near(&weights, &[0.375, 0.25]),
            "{experts:?} {weights:?}"
        );
        let Choice { experts, weights } = choose(&logits, 3, true);
        assert!(experts == [2, 1, 3] && near(&weights, &[3.0 / 7.0, 2.0 / 7.0, 2.0 / 7.0]));
    }

    #[test]
    fn no_number_is_an_expert_too() {
        let Choice { experts, weights } = choose(&[1.0, f32::NAN, 2.0], 2, true);
        assert_eq!(experts.len(), 2);
        assert!(experts.iter().all(|&expert| (0..3).contains(&expert)) && weights[0].is_nan());
    }
}
