//! Reads a tensor in place.

use std::ops::Range;

use half::bf16;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::{GROUP, HEADER_BYTES, Layout, Width, corrupt};
use crate::Result;
use crate::memory::Slot;
use crate::types::{Shape, from_bf16};

/// A tensor over borrowed bytes.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The whole tensor, or only the bytes before the first record.
    data: &'a [u8],
    layout: Layout,
    /// Records held in separate memory; `None` for records that are not loaded.
    apart: Option<&'a [Option<Slot>]>,
}

/// A gate row or a down column: its values, padded to whole groups of 64, and their scales.
#[derive(Debug, Clone, Copy)]
pub struct Half<'a> {
    /// The bytes in the storage type of the tensor's width.
    pub values: &'a [u8],
    /// bf16, one per group; empty for bf16 values.
    pub scales: &'a [[u8; 2]],
}

impl<'a> View<'a> {
    /// Checks the header and the size.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) or `InsufficientData` if the bytes are not such a tensor.
    pub fn parse(data: &'a [u8]) -> Result<View<'a>> {
        let layout = Layout::read(data)?;
        Ok(View {
            data,
            layout,
            apart: None,
        })
    }

    /// A tensor with some records loaded, each in its own memory; `head` holds the bytes before the first record.
    pub(crate) fn apart(head: &'a [u8], layout: Layout, records: &'a [Option<Slot>]) -> View<'a> {
        View {
            data: head,
            layout,
            apart: Some(records),
        }
    }

    /// Returns whether a record, counted over all experts, is loaded; other records must not be read.
    #[inline(always)]
    pub(crate) fn is_there(&self, record: usize) -> bool {
        self.apart.is_none_or(|records| records[record].is_some())
    }

    /// The shape, width and sizes.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The threshold of an expert: channels with a smaller up projection output are skipped.
    pub fn threshold(&self, expert: usize) -> f32 {
        let bytes = &self.data[HEADER_BYTES..].as_chunks::<4>().0[expert];
        f32::from_le_bytes(*bytes)
    }

    /// The bytes of a range of records, counted over all experts; the records must not be held separately.
    pub fn records(&self, records: Range<usize>) -> &'a [u8] {
        &self.data[self.layout.record_at(records.start)..self.layout.record_at(records.end)]
    }

    /// The gate row and the down column of a record, counted over all experts.
    #[inline(always)]
    pub fn halves(&self, record: usize) -> [Half<'a>; 2] {
        let (bytes, groups) = (self.layout.half_bytes(), self.layout.groups());
        let record = match self.apart {
            None => &self.data[self.layout.record_at(record)..][..self.layout.record_bytes()],
            Some(records) => records[record].as_ref().map_or(&[][..], Slot::bytes),
        };
        let (values, scales) = record.split_at(2 * bytes);
        let half = |number: usize| Half {
            values: &values[number * bytes..][..bytes],
            scales: &scales.as_chunks().0[number * groups..][..groups],
        };
        [half(0), half(1)]
    }

    /// Decodes the codes of a record, `[2 H]`, below `2^bits`; not for bf16. Records are counted over all experts.
    pub fn decode_row(&self, record: usize, codes: &mut [u8]) {
        let middle = 1 << (self.layout.width().bits() - 1);
        let halves = codes.chunks_exact_mut(self.layout.half().max(1));
        for (codes, half) in halves.zip(self.halves(record)) {
            let stored = codes.iter_mut().enumerate();
            stored.for_each(|(column, code)| *code = (middle + half.code(self.layout.width(), column)) as u8);
        }
    }

    /// Decodes the values of a record, `[2 H]`: bf16, or `scale * code` in f32. Records are counted over all experts.
    pub fn decode_values(&self, record: usize, values: &mut [f32]) {
        let halves = values.chunks_exact_mut(self.layout.half().max(1));
        for (values, half) in halves.zip(self.halves(record)) {
            for (column, value) in values.iter_mut().enumerate() {
                *value = half.value(self.layout.width(), column);
            }
        }
    }

    /// Checks that thresholds and values are valid numbers and that all padding is zero.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) that names the expert and the channel.
    pub fn verify(&self, pool: &ThreadPool) -> Result<()> {
        let Shape { experts, rows, .. } = self.layout.shape();
        for expert in 0..experts {
            let threshold = self.threshold(expert);
            if threshold.is_nan() || threshold < 0.0 {
                return corrupt(format!("invalid threshold {threshold} of expert {expert}"));
            }
        }
        if self.data[HEADER_BYTES + 4 * experts..self.layout.record_at(0)]
            .iter()
            .any(|&byte| byte != 0)
        {
            return corrupt("the padding after the thresholds is not zero");
        }
        let check = |record: usize| match self.fault(record) {
            Some(what) => corrupt(format!(
                "expert {} channel {}: {what}",
                record / rows,
                record % rows
            )),
            None => Ok(()),
        };
        pool.install(|| (0..experts * rows).into_par_iter().try_for_each(check))
    }

    /// Returns the first fault of a record.
    fn fault(&self, record: usize) -> Option<&'static str> {
        let (layout, halves) = (self.layout, self.halves(record));
        let padded = layout.half().next_multiple_of(GROUP);
        for half in &halves {
            let infinite = |bytes: &[u8; 2]| !bf16::from_le_bytes(*bytes).is_finite();
            let values = match layout.width() {
                Width::Bf16 => half.values.as_chunks().0,
                _ => &[],
            };
            if half.scales.iter().chain(values).any(infinite) {
                return Some("a value or a scale is not finite");
            }
            if (layout.half()..padded).any(|column| half.code(layout.width(), column) != 0) {
                return Some("values after the last column are not zero");
            }
        }
        let used = 2 * layout.half_bytes() + 4 * layout.groups();
        let behind = &self.records(record..record + 1)[used..];
        behind
            .iter()
            .any(|&byte| byte != 0)
            .then_some("the padding after the scales is not zero")
    }
}

impl Half<'_> {
    /// The signed code of a column, or the bits of a bf16 value.
    fn code(&self, width: Width, column: usize) -> i32 {
        let (group, lane) = (column / GROUP, column % GROUP);
        match width {
            Width::Int4 => {
                let byte = self.values[group * GROUP / 2 + lane % (GROUP / 2)];
                i32::from(byte >> (lane / (GROUP / 2) * 4) & 15) - 8
            }
            Width::Int8 => i32::from(self.values[column] as i8),
            Width::Bf16 => i32::from(u16::from_le_bytes([
                self.values[2 * column],
                self.values[2 * column + 1],
            ])),
        }
    }

    /// The value of a column.
    fn value(&self, width: Width, column: usize) -> f32 {
        match width {
            Width::Bf16 => from_bf16(self.code(width, column) as u16),
            _ => from_bf16(u16::from_le_bytes(self.scales[column / GROUP])) * self.code(width, column) as f32,
        }
    }
}
