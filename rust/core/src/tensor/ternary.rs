//! Entropy-coded ternary tensors.

use rayon::ThreadPool;

use super::values::look_up_rows;
use super::{Array, Compute, Details, Floats, Format, MAGIC_BYTES, Section, Tensor, no_parameters};
use crate::formats::ternary::layout::{MAGIC, VERSION};
use crate::formats::ternary::{
    Metadata, TernaryView, decode_bytes, decode_row_values, decode_values_bf16, decode_values_f32,
};
use crate::gemm::layer::Projection;
use crate::gemm::ternary as gemm;
use crate::types::{Mode, Shape};
use crate::{Error, Result};

/// The format [`crate::formats::ternary`].
pub(super) struct Ternary;

impl Format for Ternary {
    fn kind(&self) -> &'static str {
        "ternary"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        MAGIC
    }

    fn version(&self) -> u16 {
        VERSION
    }

    fn bytes(&self, _: Shape, _: &Details) -> Result<usize> {
        Err(Error::InvalidArgument(
            "the size of a ternary tensor depends on its codes".into(),
        ))
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        Ok(Box::new(TernaryView::parse(data)?.metadata()))
    }
}

impl Tensor for Metadata {
    fn format(&self) -> &'static dyn Format {
        &Ternary
    }

    fn name(&self) -> String {
        format!("ternary-{}", self.code().name())
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        Details::default()
            .with("code", self.code().name())
            .with("nonzeros", self.nonzeros())
            .with("level_dtype", self.level_type().name())
    }

    fn sections(&self) -> Vec<Section> {
        self.sections().into()
    }

    fn modes(&self) -> &'static [Mode] {
        &gemm::MODES
    }

    fn has_signed_codes(&self) -> bool {
        true
    }

    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()> {
        TernaryView::again(data, self)?.verify(pool)
    }

    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        decode_bytes(&TernaryView::again(data, self)?, out, pool)
    }

    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()> {
        let view = TernaryView::again(data, self)?;
        match out {
            Floats::F32(out) => decode_values_f32(&view, out, pool),
            Floats::Bf16(out) => decode_values_bf16(&view, out, pool),
        }
    }

    fn look_up(&self, data: &[u8], rows: &[usize], out: Floats, pool: &ThreadPool) -> Result<()> {
        let (view, count) = (TernaryView::again(data, self)?, self.shape().rows);
        look_up_rows(self.shape(), rows, out, pool, |row, values| {
            decode_row_values(&view, row / count, row % count, values)
        })
    }

    fn parameters(&self, data: &[u8], name: &str, _: &ThreadPool) -> Result<Array> {
        let view = TernaryView::again(data, self)?;
        let Shape { experts, rows, .. } = self.shape();
        match name {
            "levels" => {
                let levels = (0..experts * rows).flat_map(|row| <[f32; 2]>::from(view.levels(row)));
                Ok(Array::floats(&[experts, rows, 2], levels.collect()))
            }
            _ => no_parameters(self, name, &["levels"]),
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        let weights = gemm::Ternary::new(TernaryView::again(data, self)?, compute.mode, compute.isa)?;
        Ok(Box::new(weights))
    }
}
