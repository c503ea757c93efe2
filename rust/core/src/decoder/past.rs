//! Keys and values of the tokens before, in buffers with room for more.

use half::bf16;

use super::require;
use crate::Result;
use crate::types::Activations;

/// Keys or values, groups x capacity x width.
pub enum Lane<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
}

/// A layer's cache.
pub struct Past<'a> {
    /// Keys.
    pub keys: Lane<'a>,
    /// Values.
    pub values: Lane<'a>,
    /// Tokens that there are.
    pub length: usize,
}

/// A lane that is read.
#[derive(Clone, Copy)]
pub(super) struct Read<'a> {
    pub values: Activations<'a>,
    capacity: usize,
    width: usize,
}

impl Lane<'_> {
    fn values(&self) -> Activations<'_> {
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

    /// Writes a token's values, groups x width, at `place`.
    fn write(&mut self, place: usize, width: usize, token: &[f32]) {
        let groups = token.len() / width.max(1);
        let stride = self.values().len() / groups.max(1);
        for (group, from) in token.chunks_exact(width.max(1)).enumerate() {
            let at = group * stride + place * width..group * stride + (place + 1) * width;
            match self {
                Lane::F32(values) => values[at].copy_from_slice(from),
                Lane::Bf16(values) => {
                    let values = values[at].iter_mut().zip(from);
                    values.for_each(|(value, from)| *value = bf16::from_f32(*from).to_bits());
                }
            }
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
    /// Puts a token's keys and values, groups x width, behind the others.
    pub(super) fn push(&mut self, width: usize, keys: &[f32], values: &[f32]) {
        self.keys.write(self.length, width, keys);
        self.values.write(self.length, width, values);
        self.length += 1;
    }

    /// There is room for one token more.
    pub(super) fn check(&self, groups: usize, width: usize) -> Result<()> {
        let size = groups * width;
        for lane in [&self.keys, &self.values] {
            let len = lane.values().len();
            require(size > 0 && len % size == 0 && self.length < len / size, || {
                let length = self.length;
                format!("{len} values have no room for {groups} x {width} of token {length}")
            })?;
        }
        Ok(())
    }
}
