//! What layers keep of the tokens before: keys and values in buffers with room for more, or states.

use half::bf16;

use super::require;
use crate::Result;
use crate::types::Activations;

/// Values of a cache.
pub enum Lane<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
}

/// A layer's cache.
pub struct Past<'a> {
    /// Keys, groups x capacity x width; of a delta rule the last inputs of its convolution.
    pub keys: Lane<'a>,
    /// Values in the same way, maybe of another width; of a delta rule its state.
    pub values: Lane<'a>,
    /// The first token that is seen; states have no tokens.
    pub first: usize,
    /// Tokens that there are.
    pub length: usize,
}

/// A lane that is read.
#[derive(Clone, Copy)]
pub(super) struct Read<'a> {
    pub values: Activations<'a>,
    capacity: usize,
    pub width: usize,
}

impl Lane<'_> {
    pub(super) fn values(&self) -> Activations<'_> {
        match self {
            Lane::F32(values) => Activations::F32(values),
            Lane::Bf16(values) => Activations::Bf16(values),
        }
    }

    /// Rounds values to those that the lane holds.
    pub(super) fn round(&self, values: &mut [f32]) {
        if let Lane::Bf16(_) = self {
            values
                .iter_mut()
                .for_each(|value| *value = bf16::from_f32(*value).to_f32());
        }
    }

    /// The lane of `groups` groups of heads of width `width`.
    pub(super) fn read(&self, groups: usize, width: usize) -> Read<'_> {
        let values = self.values();
        Read {
            values,
            capacity: values.len() / (groups * width).max(1),
            width,
        }
    }

    /// Writes values from a place on.
    pub(super) fn put(&mut self, place: usize, from: &[f32]) {
        match self {
            Lane::F32(values) => values[place..][..from.len()].copy_from_slice(from),
            Lane::Bf16(values) => {
                let values = values[place..][..from.len()].iter_mut().zip(from);
                values.for_each(|(value, from)| *value = bf16::from_f32(*from).to_bits());
            }
        }
    }

    /// Writes the values of the token at `place`, of each group as many.
    fn push(&mut self, groups: usize, place: usize, token: &[f32]) {
        let (width, stride) = (token.len() / groups, self.values().len() / groups);
        for (group, from) in token.chunks_exact(width).enumerate() {
            self.put(group * stride + place * width, from);
        }
    }

    fn reborrow(&mut self) -> Lane<'_> {
        match self {
            Lane::F32(values) => Lane::F32(values),
            Lane::Bf16(values) => Lane::Bf16(values),
        }
    }
}

impl Read<'_> {
    /// Where a group's values of a token start.
    #[inline(always)]
    pub fn at(&self, group: usize, token: usize) -> usize {
        (group * self.capacity + token) * self.width
    }
}

impl Past<'_> {
    /// Borrows the cache for a shorter time.
    pub(super) fn reborrow(&mut self) -> Past<'_> {
        Past {
            keys: self.keys.reborrow(),
            values: self.values.reborrow(),
            ..*self
        }
    }

    /// Puts a token's keys and values, of each group as many, behind the others.
    pub(super) fn push(&mut self, groups: usize, keys: &[f32], values: &[f32]) {
        self.keys.push(groups, self.length, keys);
        self.values.push(groups, self.length, values);
    }

    /// There is room for one token more, whose keys and values have so many groups and these widths.
    pub(super) fn check(&self, groups: usize, widths: [usize; 2]) -> Result<()> {
        let (first, length) = (self.first, self.length);
        for (lane, width) in [&self.keys, &self.values].into_iter().zip(widths) {
            let (len, size) = (lane.values().len(), groups * width);
            require(
                size > 0 && len % size == 0 && first <= length && length < len / size,
                || {
                    format!(
                        "{len} values have no room for {groups} x {width} of token {length}, seen from {first} on"
                    )
                },
            )?;
        }
        Ok(())
    }
}
