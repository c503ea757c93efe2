//! The Markov chain of a dictionary's states: its average reward and the relative value of each state, in weights.
//!
//! With e_s the expected number of weights of a code in state s, t_sc the probability that it leads to state c, and g
//! the long-run weights per code, the relative values solve h_s = e_s - g + sum over c of t_sc h_c, with h_0 = 0.

use super::source::Source;
use super::tree::Tree;

/// The long-run average number of weights per code, and the relative value of every state.
pub(super) fn solve(trees: &[Tree]) -> (f64, Vec<f64>) {
    // The unknowns: g (h_0 is 0), then h_1, h_2, ...
    let rows = trees.iter().enumerate().map(|(state, tree)| {
        let mut row: Vec<f64> = (0..trees.len())
            .map(|class| f64::from(u8::from(class == state)) - tree.transition(class))
            .collect();
        row[0] = 1.0;
        row.push(tree.expected_length());
        row
    });
    let mut solution = eliminate(rows.collect());
    let gain = std::mem::replace(&mut solution[0], 0.0);
    (gain, solution)
}

/// Solves linear equations (coefficients, then the right-hand side) by Gauss-Jordan elimination with pivoting.
fn eliminate(mut rows: Vec<Vec<f64>>) -> Vec<f64> {
    let n = rows.len();
    for column in 0..n {
        let pivot = (column..n).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()));
        rows.swap(column, pivot.unwrap_or(column));
        let scale = rows[column][column];
        rows[column].iter_mut().for_each(|x| *x /= scale);
        let reference = rows[column].clone();
        for (_, row) in rows.iter_mut().enumerate().filter(|&(i, _)| i != column) {
            let factor = row[column];
            row.iter_mut().zip(&reference).for_each(|(x, y)| *x -= factor * y);
        }
    }
    rows.iter().map(|row| row[n]).collect()
}

/// Initial relative values, those of an ideal code: the weights up to the first non-zero that a promise of d
/// announces, minus the weights that an ideal code describes with the same number of bits.
pub(super) fn initial_values(promises: &[u8], source: &Source) -> Vec<f64> {
    let [p0, p1, p2] = source.probabilities;
    let entropy = source.entropy();
    let symbol = -(p1 * p1.log2() + p2 * p2.log2()) / (1.0 - p0);
    let value = |&promise: &u8| {
        let kept = 1.0 - source.zeros(promise);
        let first_nonzero_at = |zeros: u8| {
            let bits = symbol - f64::from(zeros) * p0.log2() + kept.log2();
            source.zeros(zeros) * (1.0 - p0) / kept * (f64::from(zeros) + 1.0 - bits / entropy)
        };
        (0..promise).map(first_nonzero_at).sum()
    };
    promises.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_equations_are_solved() {
        let solution = eliminate(vec![vec![0.0, 2.0, 6.0], vec![1.0, 1.0, 5.0]]);
        assert_eq!(solution, [2.0, 3.0]);
    }
}
