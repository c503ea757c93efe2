//! Rotary position embeddings: pairs of a head's values are rotated by angles proportional to the position.

/// The rotation of heads.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// The angle of each pair at position 1; a head has twice as many rotated values.
    pub frequencies: &'a [f32],
    /// The factor of rotated values.
    pub scale: f32,
    /// The order of pairs.
    pub order: Order,
}

/// The positions of a pair's two values among the rotated ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Half of the rotated values apart.
    Halves,
    /// Adjacent.
    Pairs,
    /// Adjacent before the rotation, half of the rotated values apart afterwards.
    PairsToHalves,
}

/// The rotation at a position.
pub(super) struct Rotation {
    cosines: Vec<f32>,
    sines: Vec<f32>,
    order: Order,
}

impl Rotary<'_> {
    pub(super) fn at(&self, position: usize) -> Rotation {
        let angles = self
            .frequencies
            .iter()
            .map(|frequency| position as f32 * frequency);
        let (sines, cosines) = angles
            .map(|angle| (angle.sin() * self.scale, angle.cos() * self.scale))
            .unzip();
        Rotation {
            cosines,
            sines,
            order: self.order,
        }
    }
}

impl Rotation {
    /// Rotates heads of a width in place: the values from `start` on, two per frequency.
    pub fn apply(&self, heads: &mut [f32], width: usize, start: usize) {
        let half = self.cosines.len();
        let (apart, side) = ((1, half), (2, 1));
        let (from, to) = match self.order {
            Order::Halves => (apart, apart),
            Order::Pairs => (side, side),
            Order::PairsToHalves => (side, apart),
        };
        let mut rotated = vec![0.0; 2 * half];
        for head in heads.chunks_exact_mut(width.max(1)) {
            let head = &mut head[start..start + 2 * half];
            for (pair, (cos, sin)) in self.cosines.iter().zip(&self.sines).enumerate() {
                let (a, b) = (head[pair * from.0], head[pair * from.0 + from.1]);
                rotated[pair * to.0] = a * cos - b * sin;
                rotated[pair * to.0 + to.1] = b * cos + a * sin;
            }
            head.copy_from_slice(&rotated);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_follow_their_order() {
        let frequencies = [std::f32::consts::FRAC_PI_2, 0.0];
        let rotated = |order| {
            let (rotary, mut head) = (
                Rotary {
                    frequencies: &frequencies,
                    scale: 2.0,
                    order,
                },
                [9.0, 1.0, 2.0, 3.0, 4.0, 8.0],
            );
            rotary.at(1).apply(&mut head, 6, 1);
            head.map(f32::round)
        };
        assert_eq!(rotated(Order::Halves), [9.0, -6.0, 4.0, 2.0, 8.0, 8.0]);
        assert_eq!(rotated(Order::Pairs), [9.0, -4.0, 2.0, 6.0, 8.0, 8.0]);
        assert_eq!(rotated(Order::PairsToHalves), [9.0, -4.0, 6.0, 2.0, 8.0, 8.0]);
    }
}
