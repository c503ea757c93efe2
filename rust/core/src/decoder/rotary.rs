//! Rotary positions: pairs of a head's values, half a head apart, are turned by angles that grow with the position.

/// How heads are turned.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// Half a head's width: the angle of each pair at position 1.
    pub frequencies: &'a [f32],
    /// What turned values are multiplied by.
    pub scale: f32,
}

/// The turn at a position.
pub(super) struct Turn {
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Rotary<'_> {
    pub(super) fn at(&self, position: usize) -> Turn {
        let angles = self
            .frequencies
            .iter()
            .map(|frequency| position as f32 * frequency);
        let (sines, cosines) = angles
            .map(|angle| (angle.sin() * self.scale, angle.cos() * self.scale))
            .unzip();
        Turn { cosines, sines }
    }
}

impl Turn {
    /// Turns heads in their place.
    pub fn apply(&self, heads: &mut [f32]) {
        let half = self.cosines.len();
        for head in heads.chunks_exact_mut((2 * half).max(1)) {
            let (first, second) = head.split_at_mut(half);
            for (pair, (cos, sin)) in first
                .iter_mut()
                .zip(second)
                .zip(self.cosines.iter().zip(&self.sines))
            {
                let (a, b) = (*pair.0, *pair.1);
                *pair.0 = a * cos - b * sin;
                *pair.1 = b * cos + a * sin;
            }
        }
    }
}
