//! Gate rows and down columns by channels.

use rayon::ThreadPool;

use super::values::{fill_floats, fill_rows, look_up_rows};
use super::{Array, Compute, Details, Floats, Format, MAGIC_BYTES, Section, Tensor, no_parameters};
use crate::formats::channels::{HEADER_BYTES, Layout, MAGIC, VERSION, View, Width};
use crate::gemm::layer::Projection;
use crate::gemm::sparse;
use crate::types::{Mode, Shape, from_bf16};
use crate::{Error, Result};

/// The format [`crate::formats::channels`].
pub(super) struct Channels;

impl Format for Channels {
    fn kind(&self) -> &'static str {
        "channels"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        MAGIC
    }

    fn version(&self) -> u16 {
        VERSION
    }

    fn bytes(&self, shape: Shape, specification: &Details) -> Result<usize> {
        let width = Width::from_bits(specification.integer("bits")?)?;
        Ok(Layout::new(shape, width)?.total_bytes())
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        Ok(Box::new(View::parse(data)?.layout()))
    }
}

impl Tensor for Layout {
    fn format(&self) -> &'static dyn Format {
        &Channels
    }

    fn name(&self) -> String {
        format!("channels-{}bit", self.width().bits())
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        Details::default().with("bits", self.width().bits())
    }

    fn sections(&self) -> Vec<Section> {
        let start = self.total_bytes() - self.shape().experts * self.shape().rows * self.record_bytes();
        vec![
            ("thresholds", HEADER_BYTES..start),
            ("records", start..self.total_bytes()),
        ]
    }

    fn modes(&self) -> &'static [Mode] {
        &sparse::MODES
    }

    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()> {
        View::parse(data)?.verify(pool)
    }

    /// Writes the codes, whose values before scaling are `code - 2^(bits - 1)`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if values are bf16 or `out` has another length.
    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        if self.width() == Width::Bf16 {
            return Err(Error::InvalidArgument(
                "channels: bf16 values have no codes".into(),
            ));
        }
        let view = View::parse(data)?;
        fill_rows(self.shape(), out, pool, |row, codes| view.decode_row(row, codes))
    }

    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()> {
        let view = View::parse(data)?;
        fill_floats(self.shape(), out, pool, |row, values| {
            view.decode_values(row, values)
        })
    }

    fn look_up(&self, data: &[u8], rows: &[usize], out: Floats, pool: &ThreadPool) -> Result<()> {
        let view = View::parse(data)?;
        look_up_rows(self.shape(), rows, out, pool, |row, values| {
            view.decode_values(row, values);
            Ok(())
        })
    }

    fn parameters(&self, data: &[u8], name: &str, _: &ThreadPool) -> Result<Array> {
        let (view, Shape { experts, rows, .. }) = (View::parse(data)?, self.shape());
        match name {
            "thresholds" => {
                let thresholds = (0..experts).map(|expert| view.threshold(expert));
                Ok(Array::floats(&[experts], thresholds.collect()))
            }
            "scales" => {
                let halves = (0..experts * rows).flat_map(|record| view.halves(record));
                let scales = halves.flat_map(|half| half.scales);
                let scales = scales.map(|bits| from_bf16(u16::from_le_bytes(*bits))).collect();
                Ok(Array::floats(&[experts, rows, 2 * self.groups()], scales))
            }
            _ => no_parameters(self, name, &["thresholds", "scales"]),
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        let records = sparse::Records::new(View::parse(data)?, compute.mode, compute.isa)?;
        Ok(Box::new(records))
    }
}
