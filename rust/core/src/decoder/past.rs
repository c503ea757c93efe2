//! The state of past tokens that layers keep: growing buffers of keys and values, or recurrent states.

use half::bf16;

use super::require;
use crate::Result;
use crate::types::Activations;

/// The values of a cache.
pub enum Lane<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
}

/// A layer's cache.
pub struct Past<'a> {
    /// Keys, groups x capacity x width; for a delta rule, the last inputs of its convolution.
    pub keys: Lane<'a>,
    /// Values, likewise, possibly of another width; for a delta rule, its state.
    pub values: Lane<'a>,
    /// The first visible token; recurrent states ignore it.
    pub first: usize,
    /// The number of tokens in the cache.
    pub length: usize,
}

/// A read-only lane.
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

    /// Rounds values to the precision of the lane.
    pub(super) fn round(&self, values: &mut [f32]) {
        if let Lane::Bf16(_) = self {
            values
                .iter_mut()
                .for_each(|value| *value = bf16::from_f32(*value).to_f32());
        }
    }

    /// The lane as `groups` groups of heads of width `width`.
    pub(super) fn read(&self, groups: usize, width: usize) -> Read<'_> {
        let values = self.values();
        Read {
            values,
            capacity: values.len() / (groups * width).max(1),
            width,
        }
    }

    /// Writes values starting at an offset.
    pub(super) fn put(&mut self, place: usize, from: &[f32]) {
        match self {
            Lane::F32(values) => values[place..][..from.len()].copy_from_slice(from),
            Lane::Bf16(values) => {
                let values = values[place..][..from.len()].iter_mut().zip(from);
                values.for_each(|(value, from)| *value = bf16::from_f32(*from).to_bits());
            }
        }
    }

    /// Writes the values of the token at `place` to each group.
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
    /// The offset of a group's values of a token.
    #[inline(always)]
    pub fn at(&self, group: usize, token: usize) -> usize {
        (group * self.capacity + token) * self.width
    }
}

impl Past<'_> {
    /// Reborrows the cache.
    pub(super) fn reborrow(&mut self) -> Past<'_> {
        Past {
            keys: self.keys.reborrow(),
            values: self.values.reborrow(),
            ..*self
        }
    }

    /// Appends a token's keys and values to each group.
    pub(super) fn push(&mut self, groups: usize, keys: &[f32], values: &[f32]) {
        self.keys.push(groups, self.length, keys);
        self.values.push(groups, self.length, values);
    }

    /// Checks that there is room for one more token, with the given number of groups and widths of keys and values.
    pub(super) fn check(&self, groups: usize, widths: [usize; 2]) -> Result<()> {
        let (first, length) = (self.first, self.length);
        for (lane, width) in [&self.keys, &self.values].into_iter().zip(widths) {
            let (len, size) = (lane.values().len(), groups * width);
            require(
                size > 0 && len % size == 0 && first <= length && length < len / size,
                || {
                    format!(
                        "a cache of {len} values has no room for {groups} x {width} of token {length}, \
                         visible from {first} on"
                    )
                },
            )?;
        }
        Ok(())
    }
}
