//! Entropy-coded integers.

use rayon::ThreadPool;

use super::{Array, Compute, Details, Floats, Format, MAGIC_BYTES, Tensor, no_parameters};
use crate::formats::coded::{Coded, CodedView, ColumnScales, MAGIC, VERSION};
use crate::gemm::coded as gemm;
use crate::gemm::layer::Projection;
use crate::types::{Mode, Shape};
use crate::{Error, Result, simd};

/// The format [`crate::formats::coded`].
pub(super) struct CodedIntegers;

impl Format for CodedIntegers {
    fn kind(&self) -> &'static str {
        "coded"
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
        &CodedIntegers
    }

    fn name(&self) -> String {
        format!("coded-{:.2}bit", self.bits_per_weight())
    }

    fn shape(&self) -> Shape {
        self.layout().shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        let layout = self.layout();
        let details = Details::default()
            .with("bits_per_weight", &*format!("{:.4}", self.bits_per_weight()))
            .with("stream_rows", layout.stream_rows())
            .with("tables", layout.tables())
            .with("exceptions", layout.exceptions())
            .with("row_scales", layout.has_row_scales())
            .with("dtype", layout.scale_type())
            .with("symbols", &*layout.symbols().to_string());
        match layout.column_scales() {
            ColumnScales::None => details,
            _ => details.with("column_scales", true),
        }
    }

    fn modes(&self) -> &'static [Mode] {
        &gemm::MODES
    }

    fn has_signed_codes(&self) -> bool {
        true
    }

    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()> {
        self.view(data)?.verify(simd::active()?, pool)
    }

    /// Writes the codes as signed bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a code does not fit a signed byte or `out` has another length.
    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        let put = |row: usize, codes: &[i32], out: &mut [u8]| {
            for (out, &code) in out.iter_mut().zip(codes) {
                let byte = i8::try_from(code).map_err(|_| {
                    Error::InvalidArgument(format!(
                        "code {code} in row {row}, counted over all experts, does not fit a signed byte"
                    ))
                })?;
                *out = byte as u8;
            }
            Ok(())
        };
        self.view(data)?.decode_rows(simd::active()?, out, pool, put)
    }

    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()> {
        let (view, isa) = (self.view(data)?, simd::active()?);
        match out {
            Floats::F32(out) => view.decode_rows(isa, out, pool, |row, codes, out| {
                values(&view, row, codes, out, |value| value);
                Ok(())
            }),
            Floats::Bf16(out) => view.decode_rows(isa, out, pool, |row, codes, out| {
                values(&view, row, codes, out, rounded);
                Ok(())
            }),
        }
    }

    fn look_up(&self, data: &[u8], rows: &[usize], out: Floats, pool: &ThreadPool) -> Result<()> {
        let (view, isa) = (self.view(data)?, simd::active()?);
        match out {
            Floats::F32(out) => view.look_up(isa, rows, out, pool, |row, codes, out| {
                values(&view, row, codes, out, |value| value);
            }),
            Floats::Bf16(out) => view.look_up(isa, rows, out, pool, |row, codes, out| {
                values(&view, row, codes, out, rounded);
            }),
        }
    }

    fn parameters(&self, data: &[u8], name: &str, _: &ThreadPool) -> Result<Array> {
        let (view, layout) = (self.view(data)?, self.layout());
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = layout.shape();
        match (name, layout.column_scales()) {
            ("scales", _) => {
                let dims = if layout.has_row_scales() {
                    [experts, rows]
                } else {
                    [1, 1]
                };
                Ok(Array::floats(&dims, view.row_scales()))
            }
            ("columns", kind) if kind != ColumnScales::None => {
                let dims = [kind.rows(experts), columns];
                Ok(Array::floats(&dims, view.column_scales()))
            }
            (_, ColumnScales::None) => no_parameters(self, name, &["scales"]),
            _ => no_parameters(self, name, &["scales", "columns"]),
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        Ok(Box::new(gemm::Coded::new(
            self.view(data)?,
            compute.mode,
            compute.isa,
        )?))
    }
}

/// Writes the values of a row's codes; `row` is counted over all experts.
fn values<T>(view: &CodedView, row: usize, codes: &[i32], out: &mut [T], round: impl Fn(f32) -> T) {
    let (scale, rows) = (view.scale(row), view.layout().shape().rows);
    let pairs = out.iter_mut().zip(codes);
    match view.columns(row / rows) {
        None => pairs.for_each(|(out, &code)| *out = round(scale * code as f32)),
        Some(columns) => columns.each(pairs, |(out, &code), column| {
            *out = round((scale * code as f32) * column);
        }),
    }
}

/// The bits of a value in bf16.
fn rounded(value: f32) -> u16 {
    half::bf16::from_f32(value).to_bits()
}
