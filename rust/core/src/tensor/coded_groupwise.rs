//! Group-wise integers whose bytes are entropy coded.

use rayon::ThreadPool;

use super::values::look_up_floats;
use super::{Array, Compute, Details, Floats, Format, MAGIC_BYTES, Tensor, groupwise, no_parameters};
use crate::formats::coded_groupwise::{Coded, MAGIC, VERSION};
use crate::formats::groupwise::{BLOCK_ROWS, Blocks, View};
use crate::gemm::groupwise::{Groupwise, MODES};
use crate::gemm::layer::Projection;
use crate::types::{Mode, Shape};
use crate::{Error, Result};

/// The format [`crate::formats::coded_groupwise`].
pub(super) struct CodedGroupwise;

impl Format for CodedGroupwise {
    fn kind(&self) -> &'static str {
        "coded-groupwise"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        MAGIC
    }

    fn version(&self) -> u16 {
        VERSION
    }

    fn bytes(&self, _: Shape, _: &Details) -> Result<usize> {
        Err(Error::InvalidArgument(
            "the size of a coded tensor depends on its codes".into(),
        ))
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        Ok(Box::new(Coded::parse(data)?))
    }
}

impl Tensor for Coded {
    fn format(&self) -> &'static dyn Format {
        &CodedGroupwise
    }

    fn name(&self) -> String {
        format!("groupwise-{}bit-coded", self.layout().bits())
    }

    fn shape(&self) -> Shape {
        self.layout().shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        groupwise::details(&self.layout())
    }

    fn modes(&self) -> &'static [Mode] {
        &MODES
    }

    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()> {
        self.view(data)?.verify(pool)
    }

    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        self.layout().decode(&self.view(data)?.expand(pool)?, out, pool)
    }

    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()> {
        self.layout()
            .dequantize(&self.view(data)?.expand(pool)?, out, pool)
    }

    fn look_up(&self, data: &[u8], rows: &[usize], out: Floats, pool: &ThreadPool) -> Result<()> {
        let (view, layout) = (self.view(data)?, self.layout());
        let (count, blocks) = (layout.shape().rows, layout.blocks());
        let block_of = |row: usize| row / count * blocks + row % count / BLOCK_ROWS;
        look_up_floats(layout.shape(), rows, out, pool, block_of, |named| {
            let mut buffer = Vec::new();
            let block = view.fetch(block_of(named[0].0), &mut buffer);
            for (row, values) in named {
                layout.block_values(block, *row % count % BLOCK_ROWS, values);
            }
            Ok(())
        })
    }

    fn parameters(&self, data: &[u8], name: &str, pool: &ThreadPool) -> Result<Array> {
        let plain = self.view(data)?.expand(pool)?;
        match groupwise::parameters(&View::parse(&plain)?, name, pool) {
            Some(found) => Ok(found),
            None => no_parameters(self, name, groupwise::parameter_names(&self.layout())),
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        Ok(Box::new(Groupwise::new(
            self.view(data)?,
            compute.mode,
            compute.isa,
        )?))
    }
}
